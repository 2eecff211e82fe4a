"""AutoLoader and `run`: torch's own iterator, made elastic, and what decides how many workers it has.

loader (arguments, what people read) - live (what is known of a loader, which iterator it gets) - found (as `tune()` tells it)
iterator (a pass over an epoch: note, tune, next batch) - elastic (torch's iterator, resized) - unasked (nobody asked for any)
channel, segments (how batches travel) - worker, seeds, nursery (workers) - torchs (private names of torch) - tuner, meter
"""
