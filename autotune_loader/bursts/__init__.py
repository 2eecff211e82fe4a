"""Runs one configuration for real, in a process of its own that can change no file of the user's: one record comes back.

parent      starts that process, asks it for bursts, and ends it
protocol    what the two say to each other
packing     the workload as a file that the process maps
settings    what the script has set in its own process
child       the life of the process
files       which files it may change
bench       the workload, loaded and warmed up
step        the training step
loop        one timed run
device      the times of a run on an accelerator
failures    from an error to a `Failure` with advice
"""
