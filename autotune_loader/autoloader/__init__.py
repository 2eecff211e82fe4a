"""AutoLoader and `run`: torch's own iterator, made elastic, and what decides how many workers it has.

loader.py    `AutoLoader`, its arguments and what people read
live.py      what is known of a loader, and which iterator it gets
iterator.py  a pass over an epoch with 0 to N workers: note, tune, next batch
late.py      when a batch is late, and when it is given to another worker, too
look.py      whether workers that nobody asked for may make what the loop makes
seeds.py     the random numbers of a batch
channel.py   what torch takes for its queues
segments.py  the memory of batches
pinning.py   the same, registered with CUDA
births.py    how workers are born
worker.py    what runs in one
guard.py     whether a fresh process would run the training again
tuner.py     how many workers, and how deep their queues
outlook.py   what is expected of each number and depth
meter.py     what one of them reaches
torchs.py    private names of torch
"""
