"""Which resource binds each workload, and how soon is a compute-bound job recognised?

    python -m studies.fidelity.limits

Every workload's limits from its step on a cached batch, two bursts, and for files a first and a second reading. "seconds" is
the time from the ready child to the verdict: the step's ceiling and one burst. Goal: 3 s.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from autotune_loader.demo import cache_folder
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import OpenProbe, open_probe
from autotune_loader.tuning.schedule import SEARCH_BURST
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import CEILING_BURST
from studies.fidelity import ceilings
from studies.fidelity.ceilings import Limit
from studies.fidelity.grid import WORKLOAD_NAMES
from studies.fidelity.measure import workload_of
from studies.fidelity.records import RESULTS, append
from studies.quiet import QuietTurns
from studies.workloads import WORKLOADS

RAW = RESULTS / "limits.jsonl"
TOUCH_BURST = replace(SEARCH_BURST, min_s=1.0, max_s=1.5, relative_error=0.0, seed=4711)
STEP_USES_CORES = 0.5
"""A step that keeps fewer cores busy than this computes elsewhere."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.limits")
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    quiet = QuietTurns(parser.parse_args().lock)
    with quiet.turns():
        for name in WORKLOAD_NAMES:
            with open_probe(workload_of(WORKLOADS[name]()), inspect_machine(), "process", None) as opened:
                _one(name, opened)
            quiet.next()


def _one(name: str, opened: OpenProbe) -> None:
    probe, cores = opened.probe, inspect_machine().usable_cores
    begun = time.monotonic()
    cached = _certain(probe.step_ceiling(None, CEILING_BURST))
    first = _certain(probe.burst(LoaderConfig(num_workers=2, prefetch_factor=2), SEARCH_BURST))
    is_compute_bound = ceilings.is_compute_bound(cached, first)
    seconds = time.monotonic() - begun
    steps = [cached, _certain(probe.step_ceiling(1, CEILING_BURST))]
    bursts = [first, _certain(probe.burst(LoaderConfig(num_workers=cores, prefetch_factor=4), SEARCH_BURST))]
    alone = _certain(probe.burst(LoaderConfig(), SEARCH_BURST))
    uses_cores = (cached.cpu_share or 0.0) * cores >= STEP_USES_CORES
    limits = [
        ceilings.step_limit(max(steps, key=lambda step: step.samples_per_s.value)),
        ceilings.cpu_limit(bursts, float(cores), steps if uses_cores else ()),
        _storage(name, opened),
        ceilings.in_process_limit(alone),
    ]
    known = [limit for limit in limits if limit is not None]
    best = max([*bursts, alone], key=lambda burst: burst.samples_per_s.value).samples_per_s
    _tell(name, known, best.value, is_compute_bound, seconds)
    busy = ceilings.step_beside(bursts[-1])
    print(f"  step beside {cores} workers {busy.value:.0f}/s [{busy.low:.0f}, {busy.high:.0f}]")


def _storage(name: str, opened: OpenProbe) -> Limit | None:
    """From the same samples read twice, the first time not from the page cache; the other workloads read no files."""
    if name != "jpeg":
        return None
    for path in cache_folder().iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    first, second = (
        _certain(opened.probe.burst(LoaderConfig(num_workers=2, prefetch_factor=4), TOUCH_BURST)) for _ in range(2)
    )
    return ceilings.storage_limit(first, second, workers=2)


def _certain(outcome: Measurement | Failure) -> Measurement:
    assert not isinstance(outcome, Failure), outcome
    return outcome


def _tell(name: str, limits: list[Limit], best: float, is_compute_bound: bool, seconds: float) -> None:
    print(
        f"\n{name}: best of three bursts {best:.0f}/s; compute-bound: {is_compute_bound}, known after {seconds:.1f} s"
    )
    bound = ceilings.binding(limits)
    for limit in limits:
        rate = limit.samples_per_s
        mark = "<- binds" if limit is bound else ""
        print(f"  {limit.name:10} {rate.value:11.0f}/s [{rate.low:.0f}, {rate.high:.0f}]  {limit.because} {mark}")
    rates = {limit.name: limit.samples_per_s.value for limit in limits}
    ends = {limit.name: (limit.samples_per_s.low, min(limit.samples_per_s.high, 1e15)) for limit in limits}
    record = {"workload": name, "limits": rates, "intervals": ends, "best": best}
    append(RAW, {**record, "compute_bound": is_compute_bound, "seconds": seconds})


if __name__ == "__main__":
    main()
