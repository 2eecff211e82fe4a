"""AutoLoader: a DataLoader whose batches may come from worker processes of its own, as many as pay.

loader (what frameworks see) - epoch (one pass: note, tune, next item, batch) - order (which batch is next) - seeds
workers, work, transport (processes that fetch, what runs in them, how batches travel) - parts, batch_comparison (may they?)
tuner (how many) - log (what batches waited for) - found (what is known, as `tune()` tells it)
"""

from autotune_loader.autoloader.log import Log

__all__ = ["Log"]
