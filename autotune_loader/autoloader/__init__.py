"""AutoLoader and `run`: torch's own iterator, made elastic, and what decides how many workers it has.

loader: AutoLoader, its arguments and what people read
live: what is known of a loader, as `tune()` tells it, and which iterator it gets
iterator: a pass over an epoch: note, tune, next batch; where workers were asked for
unasked: where nobody asked for workers: the loop's own fetches, proof, workers beside the loop
elastic: torch's iterator, resized
channel: its queues; segments: the memory of batches; pinning: registered with CUDA
worker: what runs in a worker, its random numbers; nursery: where later workers are forked
tuner: how many workers; meter: what a number of workers reaches
torchs: private names of torch
"""
