"""Any training script, unchanged: its loaders are found where they are iterated, watched or tuned, and reported at the end.

launch (a script as Python runs it) - hook (where torch makes loaders and iterators) - session (all loaders of a process)
loader (one of them) - watched, carrying (its batches, and when each was made) - batch_log (what they add up to)
findings (what its batches tell) - verdict (one sentence, one next step) - report - ranks
"""
