"""Any training script, unchanged: its loaders are found where they are iterated, watched or tuned, and reported at the end.

run_plan (what was asked for) - launch (a script as Python runs it) - hook (where torch makes loaders and iterators; enable())
session (all loaders of a process) - script_loader (one of them) - watched (what its loop waits for)
report (what is said of it) - first_line (what is said early) - others (processes that a script starts) - sigterm
startup (finds the loaders of a Python that a script starts)
"""
