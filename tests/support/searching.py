"""A whole search on a simulated machine, told as `tune()` tells one: no process, no waiting."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from autotune_loader.decision.space import BatchCost, Limits, Space, consumer_thread_counts, max_useful_workers
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.opening import OpenProbe
from autotune_loader.probe.protocol import Probe
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning import assemble as assembler
from autotune_loader.tuning import compare as comparer
from autotune_loader.tuning import tune as tuner
from autotune_loader.tuning.assemble import assemble
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.session import Listener, TuningSession
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe


class Endless(IterableDataset[Any]):
    """A stream, whose epochs have no length."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.count()


class Silent:
    """A listener that does nothing."""

    def trial(self, *_: object) -> None: ...

    def finals_round(self, *_: object) -> None: ...


def simulated_run(
    machine: SimulatedMachine,
    space: Space | None = None,
    *,
    own: LoaderConfig | None = None,
    epoch_batches: int | None = None,
    on_cpu: bool | None = None,
    has_step: bool = True,
    **warmup: Any,
) -> RunContext:
    """What `tune()` knows of a simulated machine before its search begins.

    Args:
        machine: with its workload.
        space: the legal configurations; None for those that the machine makes sense of.
        own: the user's own configuration.
        epoch_batches: batches of an epoch; None where it never ends.
        on_cpu: whether the step computes on the CPU; None asks the machine.
        has_step: whether anything is done with a batch.
        **warmup: other fields of the `WarmupReport`.
    """
    on_cpu = machine.step_cores > 0 if on_cpu is None else on_cpu
    dataset = Endless() if epoch_batches is None else range(epoch_batches * machine.batch_size)
    seen: dict[str, Any] = {
        "first_fetch_s": machine.cpu_s + machine.wait_s,
        "first_fetch_cpu_s": machine.cpu_s,
        "default_threads": machine.cores,
        **warmup,
    }
    return RunContext(
        workload=Workload(
            data=DataSide(dataset=dataset, batch_size=machine.batch_size),
            training=TrainingSide(
                device="cpu" if on_cpu else "cuda", train_step=(lambda model, batch: None) if has_step else None
            ),
            own_config=own,
        ),
        space=_space(machine) if space is None else space,
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
    probe: Probe, run: RunContext, clock: FakeClock, *, listener: Listener | None = None, **options: Any
) -> SearchState:
    """The search of `tune()` with this probe."""
    settings = TuneOptions(**{"budget_s": 60.0, **options})
    return TuningSession(probe, run, settings, clock=clock, started=clock(), listener=listener or Silent()).run()


def on_simulated_machines(
    monkeypatch: pytest.MonkeyPatch,
    machine_of: Callable[[Workload], SimulatedMachine | str],
    probe_on: Callable[..., Probe] = SimulatedProbe,
    **warmup: Any,
) -> FakeClock:
    """From now on `tune()` and `compare()` burst on simulated machines, and the clock of `tune()` is the one returned.

    Args:
        monkeypatch: pytest's.
        machine_of: the machine of a workload; a text is what its first batch raises.
        probe_on: makes the probe of a machine.
        **warmup: other fields of the `WarmupReport`.
    """
    clock = FakeClock()

    @contextlib.contextmanager
    def opened(workload: Workload, *_: Any, **__: Any) -> Iterator[OpenProbe]:
        machine = machine_of(workload)
        if isinstance(machine, str):
            raise WorkloadError(machine, "the traceback")
        batches = None if workload.data.is_iterable else workload.data.batches_per_epoch()
        probe = probe_on(machine, clock, epoch_batches=batches)
        yield OpenProbe(probe=probe, workload=workload, warmup=simulated_run(machine, **warmup).warmup)

    for module in (tuner, comparer):
        monkeypatch.setattr(module, "open_probe", opened)
    for module in (tuner, assembler):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


def simulated_result(
    machine: SimulatedMachine, *, seed: int = 0, budget_s: float = 60.0, epoch_batches: int = 10_000
) -> TuningResult:
    """What `tune()` would return on this machine.

    Args:
        machine: with its workload.
        seed: of its noise and of the search.
        budget_s: on the simulated clock, from which 3.5 s go into starting the probe.
        epoch_batches: batches of an epoch; short ones are run whole.
    """
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed, epoch_batches=epoch_batches)
    run = simulated_run(machine, epoch_batches=epoch_batches)
    clock.advance(3.5)
    state = TuningSession(
        probe, run, TuneOptions(budget_s=budget_s, seed=seed), clock=clock, started=0.0, listener=Silent()
    ).run()
    return assemble(state, clock(), final=True)


def _space(machine: SimulatedMachine) -> Space:
    return Space(
        max_workers=max_useful_workers(machine.cores, machine.cpu_s + machine.wait_s, machine.cpu_s),
        consumer_threads=consumer_thread_counts(machine.cores, machine.cores) if machine.step_cores else (None,),
        limits=Limits(memory_bytes=machine.memory_limit_bytes or 16 << 30),
        batch=BatchCost(bytes=machine.batch_bytes, tensors=2),
    )
