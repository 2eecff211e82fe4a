"""The machine as it is, and processes of its own for the user's code.

limits.py     cores, memory, shared memory, descriptors, each with its source
facts.py      all of it as one value, and what a measurement depends on of it
processes.py  what trees of processes use, and an alarm for their memory
kernel.py     descriptors of memory and of processes, which some Pythons lack
elsewhere.py  what a process that runs the user's code may not do to the one that started it
"""
