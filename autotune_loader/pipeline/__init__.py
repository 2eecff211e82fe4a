"""The user's parts of a DataLoader, loaders that are built of them, and the times of their batches.

workload      what is tuned: the dataset with all that is the user's, and the training step
batches       what a batch is made of, and its way to an accelerator
build         a loader with a configuration; another one like a given one
by_value      objects that a spawned worker gets although it cannot import their classes
reading       which samples each burst reads
tracing       a loader whose batches carry their history
stage_clock   clocks in its workers: where a sample's time goes
throughput    from the histories of a burst's batches to its rate
loop_log      from those of a training loop to its times
"""
