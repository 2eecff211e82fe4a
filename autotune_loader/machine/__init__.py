"""The machine as it is, and processes of its own for the user's code.

limits      cores, memory, shared memory, descriptors that this process may use, with the source of every bound
facts       all of it as one value, and what a measurement depends on of it
processes   what trees of processes use, and an alarm for their memory
elsewhere   what a process that runs the user's code may not do to the one that started it
"""
