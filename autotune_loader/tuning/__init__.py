"""`tune()` and `compare()`: bursts of training before the training.

tune.py       one run, in the order of its steps
arguments.py  what the caller passed, as a workload
run.py        how to search, and what is legal for this workload on this machine
study.py      the Optuna study: opened, checked, and searched
bursting.py   how each burst is run, and for how long
assemble.py   what is chosen, and the result
torchrun.py   the same on every rank of a job
compare.py    which of some loaders is faster
"""

from autotune_loader.machine.limits import require_linux

require_linux("autotune_loader.tune")
