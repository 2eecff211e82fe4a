"""AutoLoader and `run`: torch's own iterator, made elastic, and what decides how many workers it has.

loader.py    `AutoLoader`, its arguments and what people read
live.py      what is known of a loader, and which iterator it gets
iterator.py  a pass over an epoch where workers were asked for: note, tune, next batch
unasked.py   where nobody asked for workers: the fetches of the loop, proof, workers beside it
elastic.py   torch's iterator, resized
channel.py   its queues
segments.py  the memory of batches
pinning.py   the same, registered with CUDA
worker.py    what runs in a worker, and its random numbers
nursery.py   where later workers are forked
tuner.py     how many workers
meter.py     what a number of workers reaches
torchs.py    private names of torch
"""
