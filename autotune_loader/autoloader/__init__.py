"""AutoLoader: a DataLoader whose batches may come from worker processes of its own, as many as pay.

loader (what frameworks see) - epoch (one pass: note, tune, next item, batch) - order (which batch is next) - seeds
workers, work, transport (processes that fetch, what runs in them, how batches travel) - parts, batch_comparison (may they?)
tuner (how many) - log (what batches waited for) - learnt (what earlier loaders found) - result (report, loader.json)
"""

from autotune_loader.autoloader.learnt import Registry
from autotune_loader.autoloader.log import Log

__all__ = ["Log", "Registry"]
