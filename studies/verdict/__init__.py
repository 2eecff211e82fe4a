"""Is the verdict right, and does its advice help? Bottlenecks that are known by construction, simulated and real.

    python -m studies.verdict simulated      # seconds on one core: many sizes, twice, the second time as advised
    python -m studies.verdict real           # minutes: seven workloads in two sizes, and again as advised
    python -m studies.verdict real --size large --only transport,memory --budget 25s --label confirmed    # 2 minutes
    python -m studies.verdict real --size medium --label confirmed                                        # 3 to 4 minutes

The last two confirm what was changed after the first run of the large size: the two cases that were wrong then, and a size
that no rule has seen.

A verdict is right when it names the injected bottleneck. Following an advice changes the workload or the machine as the
advice says, and tunes again: the gain is the new rate over the old one.
"""
