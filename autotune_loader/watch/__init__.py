"""Any training script, unchanged: its loaders are found where they are iterated, watched or tuned, and reported at the end.

run_plan.py               what was asked for, which processes of the script inherit
launch.py                 a script, as Python runs it
hook.py                   where torch makes loaders and iterators; `enable()`; SIGTERM
session.py                all loaders of a process; the first line that is said of one
watched.py                one of them: what its loops wait for
report.py                 what is said of it at the end
others.py                 what other processes of the script saw
startup/sitecustomize.py  finds the loaders of a Python that the script starts
"""
