"""The loops of scripts as they run, seen from beside them: figures and workers of each loader.

worker_notes.py  what torch's own workers and its pinning thread note of each batch
figures.py       what else is seen of a loader's loops and of torch's workers
"""
