"""Measures what is still missing, all workloads interleaved in one random order; stop and continue it at will."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.opening import OpenProbe, open_probe
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.twin import Observation
from autotune_loader.values.measurement import Failure, Measurement
from studies.fidelity.grid import Task
from studies.fidelity.records import append, pack, read
from studies.quiet import QuietTurns
from studies.workloads import WORKLOADS, StudyWorkload


def workload_of(study: StudyWorkload) -> Workload:
    """The study's workload as `tune()` would make it, on the CPU."""
    workload, _ = make_workload(
        study.dataset,
        study.model,
        batch_size=study.batch_size,
        train_step=study.train_step,
        device="cpu",
        drop_last=True,
    )
    return workload


class Probes:
    """One warm probe process per workload, started when first asked for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._machine: Machine = inspect_machine()
        self._open: dict[str, OpenProbe] = {}

    def __getitem__(self, name: str) -> OpenProbe:
        if name not in self._open:
            opened = open_probe(workload_of(WORKLOADS[name]()), self._machine, "process", None)
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]


@contextlib.contextmanager
def open_probes() -> Iterator[Probes]:
    with contextlib.ExitStack() as stack:
        yield Probes(stack)


def key(record: dict[str, Any]) -> Task:
    return Task(**record["task"])


def measure(wanted: list[Task], files: dict[str, Path], *, seconds: float, quiet: QuietTurns, mode: str) -> None:
    """Run every task that no record exists of, and append its record.

    Args:
        wanted: what to measure, in this order.
        files: file of each kind of record.
        seconds: length of a sustained run.
        quiet: whom to ask for the machine.
        mode: noted in each record.
    """
    done = {key(record) for path in set(files.values()) for record in read(path)}
    missing = [task for task in wanted if task not in done]
    print(f"{len(missing)} of {len(wanted)} measurements are missing")
    with open_probes() as probes:
        for name in {task.workload for task in missing}:
            _ = probes[name]  # start-up is no part of a turn
        with quiet.turns():
            for number, task in enumerate(missing, start=1):
                begun = time.monotonic()
                record = run(probes[task.workload], task, seconds)
                took_s = time.monotonic() - begun
                append(files[task.kind], {**record, "mode": mode, "seconds": round(took_s, 2), "at": time.time()})
                rate = record.get("measurement", {}).get("samples_per_s", {}).get("value", 0.0)
                print(f"{number:4}/{len(missing)} {_named(task):50} {rate:10.1f}/s {took_s:6.1f} s", flush=True)
                quiet.next()


def run(opened: OpenProbe, task: Task, seconds: float) -> dict[str, Any]:
    """One measurement, as a record."""
    plan = task.plan(seconds)
    is_ceiling = task.kind == "ceiling"
    outcome = opened.probe.step_ceiling(None, plan) if is_ceiling else opened.probe.burst(task.config, plan)
    record: dict[str, Any] = {"task": asdict(task), "threads": opened.warmup.default_threads}
    if isinstance(outcome, Failure):
        return {**record, "failure": f"{outcome.kind}: {outcome.message}"}
    kept = task.kind == "scout"
    record["measurement"] = pack(outcome, traces=kept)
    return record if kept else {**record, "truth": truth(task, outcome), "seen": _seen(task, outcome)}


def truth(task: Task, outcome: Measurement) -> float:
    """Sustained samples/s: after the queues have filled, by nothing but counting; over whole epochs where it matters."""
    traces = outcome.traces
    skip = task.num_workers * (1 + (task.prefetch_factor or 0)) + 1
    complete = len(traces) < 2048
    if not complete or len(traces) < skip + 8:
        return outcome.samples / outcome.window_s
    inside = traces[skip - 1 :]
    if task.workload == "wait_heavy_tail":
        epoch = 4096 // 8
        inside = inside[: (len(inside) - 1) // epoch * epoch + 1] if len(inside) > epoch else inside
    return sum(trace.samples for trace in inside[1:]) / (inside[-1].step_end - inside[0].step_end)


def _seen(task: Task, outcome: Measurement) -> dict[str, float]:
    """Means of the stages as the twin would see them: tells where an error comes from."""
    seen = Observation.from_measurement(task.config, outcome)
    means = {name: float(getattr(seen, name).mean()) for name in ("service_s", "cpu_s", "receive_s", "step_s")}
    return {**means, "busy_workers": seen.workers_at_work}


def _named(task: Task) -> str:
    shape = f"{task.num_workers} workers x {task.prefetch_factor or 0}"
    return f"{task.workload} {task.kind} {shape} #{task.repeat}"
