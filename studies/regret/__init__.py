"""Regret against wall seconds: how far from the best configuration each strategy ends, and what it spent to get there."""

OURS = "autotune_loader"
"""What tables and records call `tune()` itself."""
PLAIN_RULE = "plain rule"
"""What they call the rule that needs one look."""
RUNNING_LOOP = "running loop"
"""What they call the choice of one loop that is tuned as it runs."""
