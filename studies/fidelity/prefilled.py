"""Does a queue that was filled before the loop began flatter the rate?

    python -m studies.fidelity.prefilled

The loader gets 1 s before the first batch is asked for, as when a model is built in between, so every queue is full.
A naive burst then counts batches that were made while nobody looked. The truth is a run of several seconds without the
queue's content. Goal: the burst reads within 10 % of it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from pathlib import Path

from torch import nn

from autotune_loader.config import LoaderConfig
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.trial import BurstPlan, Failure, Measurement
from studies.fidelity.measure import workload_of
from studies.fidelity.records import RESULTS, append
from studies.quiet import QuietTurns
from studies.workloads import AccelStep, SleepDataset, StudyWorkload

WORKERS = 2
PREFETCH = (2, 8, 16)
BURSTS = 5
LONG_S = 6.0
WAITS_S = {"10 ms a batch": 0.00125, "40 ms a batch": 0.005}
RAW = RESULTS / "prefilled.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.prefilled")
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    quiet = QuietTurns(parser.parse_args().lock)
    for name, wait_s in WAITS_S.items():
        study = StudyWorkload(
            name=name,
            dataset=SleepDataset(4096, median_s=wait_s),
            model=nn.Identity(),
            train_step=AccelStep(0.0005),
            batch_size=8,
            description="waits alone",
            kind="wait",
        )
        with open_probe(workload_of(study), inspect_machine(), "process", None) as opened, quiet.turns():
            _measure(name, opened.probe, quiet)


def _measure(name: str, probe: object, quiet: QuietTurns) -> None:
    tasks = [(prefetch, number) for prefetch in PREFETCH for number in range(BURSTS + 1)]
    random.Random(0).shuffle(tasks)
    truths: dict[int, float] = {}
    read: dict[int, list[tuple[float, float]]] = {prefetch: [] for prefetch in PREFETCH}
    for prefetch, number in tasks:
        config = LoaderConfig(num_workers=WORKERS, prefetch_factor=prefetch)
        is_truth = number == BURSTS
        plan = (
            BurstPlan(max_s=LONG_S, min_s=LONG_S, relative_error=0.0)
            if is_truth
            else BurstPlan(pause_s=1.0, seed=number, relative_error=0.015, max_s=1.0)
        )
        measured = probe.burst(config, plan)  # type: ignore[attr-defined]
        assert not isinstance(measured, Failure), measured
        if is_truth:
            truths[prefetch] = rate_after(measured, WORKERS * (prefetch + 1))
        else:
            read[prefetch].append((measured.samples_per_s.value, rate_after(measured, 1)))
        quiet.next()
    for prefetch in PREFETCH:
        errors = [rate / truths[prefetch] - 1 for rate, _ in read[prefetch]]
        naive = [rate / truths[prefetch] for _, rate in read[prefetch]]
        append(RAW, {"workload": name, "prefetch": prefetch, "truth": truths[prefetch], "read": read[prefetch]})
        print(
            f"{name}  prefetch {prefetch:2}  truth {truths[prefetch]:7.1f}/s  burst {min(errors):+6.1%} to "
            f"{max(errors):+6.1%} (n={len(errors)})  naive reads {statistics.fmean(naive):5.2f} x the truth"
        )


def rate_after(measured: Measurement, skip: int) -> float:
    """Samples/s counted from batch `skip` to the end."""
    with contextlib.suppress(IndexError):
        inside = measured.traces[skip - 1 :]
        return sum(trace.samples for trace in inside[1:]) / (inside[-1].step_end - inside[0].step_end)
    return float("nan")


if __name__ == "__main__":
    main()
