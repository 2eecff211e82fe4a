"""Does the probe tell the truth? The twin against sustained runs, comparisons, full queues, and what tracing costs.

    python -m studies.fidelity                 # measure what is missing, then print the table and draw the plots
    python -m studies.fidelity --report        # only the table and the plots, from the kept raw data
    python -m studies.fidelity.comparisons     # false wins, power and coverage
    python -m studies.fidelity.prefilled       # full queues at the start
    python -m studies.fidelity.tracing_cost    # what tracing takes from the rate

grid       what is measured                      records    raw data, as JSON lines
measure    runs it, interleaved and resumable    analysis   the twin's errors
"""
