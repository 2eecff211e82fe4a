"""Any training script, unchanged: its loaders are found where they are iterated, watched or tuned, and reported at the end.

launch (a script as Python runs it) - hook (where torch makes and iterates loaders) - session (all loaders of a process)
site (one loader, by the line that made it) - watching, serving (its batches) - telling (the report)
"""
