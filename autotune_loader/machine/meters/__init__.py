"""Meters: samples over time, and what they add up to."""
