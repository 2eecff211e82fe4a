"""Prints this folder, for PYTHONPATH: `python -m autotune_loader.watch.startup`."""

import os

print(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - as beside it
