"""A whole search on a simulated machine, told as `tune()` tells one: no process, no waiting."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.bursts.protocol import Probe, WarmupReport
from autotune_loader.decision.space import BatchCost, Limits, Space, consumer_thread_counts, max_useful_workers
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning import assemble as assembler
from autotune_loader.tuning import compare as comparer
from autotune_loader.tuning import tune as tuner
from autotune_loader.tuning.assemble import assemble
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe

START_S = 3.5
"""What starting a probe takes of a budget."""
SILENT = SimpleNamespace(trial=lambda *_: None, finals_round=lambda *_: None)
"""A listener that does nothing."""


class Endless(IterableDataset[Any]):
    """A stream, whose epochs have no length."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.count()


def simulated_run(
    machine: SimulatedMachine,
    space: Space | None = None,
    *,
    own: LoaderConfig | None = None,
    epoch_batches: int | None = None,
    has_step: bool = True,
    **warmup: Any,
) -> RunContext:
    """What `tune()` knows of a simulated machine before its search begins; by default all that the machine makes sense of.

    `own` is the user's configuration, `warmup` other fields of the `WarmupReport`. An epoch without length never ends.
    """
    dataset = Endless() if epoch_batches is None else range(epoch_batches * machine.batch_size)
    step = (lambda model, batch: None) if has_step else None
    wall_s = machine.cpu_s + machine.wait_s
    seen = {"first_fetch_s": wall_s, "first_fetch_cpu_s": machine.cpu_s, "default_threads": machine.cores, **warmup}
    return RunContext(
        workload=Workload(
            data=DataSide(dataset=dataset, batch_size=machine.batch_size),
            training=TrainingSide(device="cpu" if machine.step_cores else "cuda", train_step=step),
            own_config=own,
        ),
        space=space
        or Space(
            max_workers=max_useful_workers(machine.cores, wall_s, machine.cpu_s),
            consumer_threads=consumer_thread_counts(machine.cores, machine.cores) if machine.step_cores else (None,),
            limits=Limits(memory_bytes=16 << 30),
            batch=BatchCost(bytes=machine.batch_bytes, tensors=2),
        ),
        warmup=WarmupReport(
            step="simulated",
            samples=machine.batch_size,
            batch_bytes=machine.batch_bytes,
            batch_tensors=2,
            on_accelerator=False,
            **seen,
        ),
        fingerprint=Fingerprint(usable_cores=machine.cores),
        usable_cores=machine.cores,
        tolerance=0.02,
    )


def simulated_search(
    probe: Probe, run: RunContext, clock: FakeClock, *, listener: Any = SILENT, **options: Any
) -> SearchState:
    """The search of `tune()` with this probe."""
    settings = TuneOptions(**{"budget_s": 60.0, **options})
    return TuningSession(probe, run, settings, clock=clock, started=clock(), listener=listener).run()


def simulated_result(
    machine: SimulatedMachine, *, seed: int = 0, budget_s: float = 60.0, epoch_batches: int = 10_000
) -> TuningResult:
    """What `tune()` would return on this machine; short epochs are run whole."""
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed, epoch_batches=epoch_batches)
    run, options = simulated_run(machine, epoch_batches=epoch_batches), TuneOptions(budget_s=budget_s, seed=seed)
    clock.advance(START_S)
    state = TuningSession(probe, run, options, clock=clock, started=0.0, listener=SILENT).run()
    return assemble(state, clock(), final=True)


def on_simulated_machines(
    monkeypatch: pytest.MonkeyPatch,
    machine_of: Callable[[Workload], SimulatedMachine | str],
    probe_on: Callable[..., Probe] = SimulatedProbe,
) -> None:
    """From now on `tune()` and `compare()` burst on the machine of a workload; a text is what its first batch raises."""
    clock = FakeClock()

    @contextlib.contextmanager
    def opened(workload: Workload, *_: Any, **__: Any) -> Iterator[OpenProbe]:
        machine = machine_of(workload)
        if isinstance(machine, str):
            raise WorkloadError(machine, "the traceback")
        batches = None if workload.data.is_iterable else workload.data.batches_per_epoch()
        probe = probe_on(machine, clock, epoch_batches=batches)
        yield OpenProbe(probe=probe, warmup=simulated_run(machine).warmup)

    for module in (tuner, comparer):
        monkeypatch.setattr(module, "open_probe", opened)
    for module in (tuner, assembler):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
