"""Frozen records, errors, statistics and serialisation: what everything else is written in."""
