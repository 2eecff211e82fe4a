"""AutoLoader: a DataLoader whose batches may come from worker processes of its own, as many as pay.

loader (what frameworks see) - epoch (one pass: note, tune, next item, batch) - order (which batch is next) - seeds
workers, work (processes that fetch, what runs in them) - parts, difference, batch_comparison (may they fetch for the loop?)
tuner (how many) - found (what is known, as `tune()` tells it) - asked (the arguments)
"""
