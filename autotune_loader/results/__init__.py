"""What a run found, as values.

file         `load_config()`: `loader.json` in the training job
record       findings, and the record of a tuned, watched or self-tuning loader
comparison   the record of `compare()`
"""
