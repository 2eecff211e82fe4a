"""Is the verdict right, and does its advice help? Bottlenecks that are known by construction, simulated and real.

    python -m studies.verdict simulated      # seconds on one core: many sizes, twice, the second time as advised
    python -m studies.verdict real           # minutes: seven workloads in two sizes, and again as advised

A verdict is right when it names the injected bottleneck. Following an advice changes the workload or the machine as the
advice says, and tunes again: the gain is the new rate over the old one.
"""
