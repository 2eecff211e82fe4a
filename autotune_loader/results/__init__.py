"""What a run found, as values.

file.py        `load_config()`: `loader.json` in the training job
record.py      findings, and the record of a tuned, watched or self-tuning loader
comparison.py  the record of `compare()`
"""
