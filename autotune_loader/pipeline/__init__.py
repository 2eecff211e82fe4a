"""The user's parts of a DataLoader, loaders that are built of them, and the times of their batches.

workload.py      what is tuned: the dataset with all that is the user's, and the training step
batches.py       what a batch is made of, and its way to an accelerator
equal.py         whether two batches are equal
build.py         a loader with a configuration; another one like a given one
by_value.py      objects that a spawned worker gets although it cannot import their classes
reading.py       which samples each burst reads
tracing.py       a loader whose batches carry their history
stage_clock.py   clocks in its workers: where a sample's time goes
throughput.py    from the histories of a burst's batches to its rate
forking.py       the process that workers are forked from
waits.py         what a loop waited for, by the histories of its batches
loop_log.py      from those of a training loop to its times
"""
