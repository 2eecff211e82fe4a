"""Regret against wall seconds: how far from the best configuration each strategy ends, and what it spent to get there."""
