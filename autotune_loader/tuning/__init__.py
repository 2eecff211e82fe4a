"""`tune()`: bursts of training before the training."""

from autotune_loader.machine.limits import require_linux

require_linux("autotune_loader.tune")
