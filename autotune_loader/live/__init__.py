"""AutoLoader: a DataLoader that tunes its workers while it trains, with the samples of one that never changes.

loader (what frameworks see) - epoch (changes, losses) - pool (one DataLoader) - order (which batch is next)
tuner (when to change, to what) - blocks (what its batches tell) - shift (is it still so) - result (loader.json)
"""

from autotune_loader.machine.host import require_linux

require_linux("AutoLoader")
