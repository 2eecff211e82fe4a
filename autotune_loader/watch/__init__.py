"""Any training script, unchanged: its loaders are found where they are iterated, watched or tuned, and reported at the end.

run_plan (what was asked for, and how people are told) - launch (a script as Python runs it)
hook (where torch makes loaders and iterators, and where the report is told; `enable`) - session (all loaders of a process)
watched (one of them, and what its loop waits for) - report (what is said of it) - others (processes that a script starts)
startup (finds the loaders of a Python that a script starts)
"""
