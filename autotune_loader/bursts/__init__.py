"""Runs one configuration for real, in a process of its own that can change no file of the user's: one record comes back.

parent.py    starts that process, asks it for bursts, and ends it
protocol.py  what the two say to each other
packing.py   the workload as a file that the process maps
settings.py  what the script has set in its own process
child.py     the life of the process
files.py     which files it may change
repeats.py   whether the workers of a stream repeat each other
bench.py     the workload, loaded and warmed up
step.py      the training step
loop.py      one timed run
device.py    the times of a run on an accelerator
failures.py  from an error to a `Failure` with advice
"""
