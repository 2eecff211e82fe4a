"""Does the probe tell the truth? The twin against sustained runs, comparisons, and what few arms in turns tell.

    python -m studies.fidelity                 # the twin on a grid: measure what is missing, print the tables, draw the plot
    python -m studies.fidelity.fresh           # the twin on data that it has never seen
    python -m studies.fidelity.comparisons     # false wins, power and coverage
    python -m studies.fidelity.compare NAME    # a few arms in turns: queues that fill, few rounds, what tracing costs, ...
    python -m studies.fidelity.limits          # which resource binds

grid       what is measured                      records    raw data, as JSON lines
measure    runs it, interleaved and resumable    analysis   the twin's errors
"""
