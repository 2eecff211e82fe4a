"""The machine as it is, and processes of its own for the user's code.

limits.py     cores, memory, shared memory, descriptors, each with its source
facts.py      all of it as one value, and what a measurement depends on of it
nvml.py       how busy a GPU is, as NVML tells it
processes.py  what trees of processes use, and an alarm for their memory
clocks.py     what a process waited for a core, and spent on garbage
kernel.py     system calls that Pythons lack: clones, descriptors of memory and of processes
parcel.py     objects on their way to another process, and whether they are the same as before
nursery.py    where workers are born, as the training sees it
clones.py     what runs there
elsewhere.py  what a process that runs the user's code may not do to the one that started it
"""
