"""Regret against wall seconds: how far from the best configuration each strategy ends, and what it spent to get there."""

OURS = "autotune_loader"
"""What tables and records call `tune()` itself."""
