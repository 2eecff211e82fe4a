"""What a run found, as values.

file.py        `load_config()`: `loader.json` in the training job
result.py      `TuningResult`, and the findings in it
comparison.py  `Comparison`, the result of `compare()`
"""
