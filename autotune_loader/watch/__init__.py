"""Any training script, unchanged: its loaders are found where they are iterated, watched or tuned, and reported at the end.

plan (what was asked for) - launch (a script as Python runs it) - hook (where torch makes loaders and iterators)
session (all loaders of a process) - loader (one of them) - tally (what its loop waits for) - report (what is said of it)
enabling (the same from within a script) - startup (the same in processes that a script starts)
"""
