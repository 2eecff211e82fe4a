"""Meters: samples over time, and what they add up to. The probe wraps `memory.TreeMeter` around a burst."""
