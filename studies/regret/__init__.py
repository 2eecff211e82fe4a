"""Regret against wall seconds: how far from the best configuration each strategy ends, and what it spent to get there."""

OURS = "autotune_loader"
"""What tables and records call `tune()` itself."""
PLAIN_RULE = "plain rule"
"""What they call the rule that needs one look."""
