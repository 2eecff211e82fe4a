"""Runs one configuration for real, in a process of its own or inline, and answers with one record."""
