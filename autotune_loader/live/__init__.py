"""AutoLoader: a DataLoader whose workers can change while it trains, with the samples of one that never changes.

loader (what frameworks see) - iterator (one epoch: changes, losses) - pool (one DataLoader) - order (which batch is next).
"""
