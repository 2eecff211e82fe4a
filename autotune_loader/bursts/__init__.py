"""Runs one configuration for real, in a process of its own that can change no file of the user's: one record comes back."""
