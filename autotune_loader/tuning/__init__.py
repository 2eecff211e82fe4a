"""`tune()` and `compare()`: bursts of training before the training.

tune        one run, in the order of its steps
arguments   what the caller passed, as a workload
run         how to search, and what is legal for this workload on this machine
study       the Optuna study: opened, checked, and searched
bursting    how each burst is run, and for how long
assemble    what is chosen, and the result
torchrun    the same on every rank of a job
compare     which of some loaders is faster
"""

from autotune_loader.machine.limits import require_linux

require_linux("autotune_loader.tune")
