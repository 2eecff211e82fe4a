"""Whole runs of `tune()` and `compare()` on simulated machines: no process, no waiting."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.bursts.protocol import WarmupReport
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.report.progress import make_progress
from autotune_loader.search.space import BatchCost, Context, Limits, Space
from autotune_loader.tuning import compare as comparer
from autotune_loader.tuning import tune as tuner
from autotune_loader.tuning.assemble import assembled
from autotune_loader.tuning.bursting import Budget
from autotune_loader.tuning.run import Run
from autotune_loader.tuning.study import Search
from autotune_loader.values import BurstPlan, LoaderConfig, Trial, WorkloadError
from tests.support.data import Stream
from tests.support.simulation import FakeClock, SimulatedProbe


def with_workers(count, prefetch=2, **more):
    """A configuration with so many workers; without any, nothing is fetched ahead."""
    return LoaderConfig(num_workers=count, prefetch_factor=prefetch if count else None, **more)


def simulated_trials(machine, *configs, seed=0):
    """A burst of each configuration."""
    probe, plan = SimulatedProbe(machine, FakeClock(), seed=seed), BurstPlan(max_s=0.6, min_s=0.3)
    return [Trial.of(i, config, probe.burst(config, plan)) for i, config in enumerate(configs)]


def simulated_warmup(machine, **changes):
    """What a probe knows of a simulated machine once it is warm."""
    batch = {"samples": machine.batch_size, "batch_bytes": machine.batch_bytes, "batch_tensors": 2}
    fetch_s = machine.cpu_s + machine.wait_s
    first = {"first_fetch_s": fetch_s, "first_fetch_cpu_s": machine.cpu_s, "first_batch_s": fetch_s}
    rest = {"step": "simulated", "on_accelerator": False, "default_threads": machine.cores}
    return WarmupReport(**{**batch, **first, **rest, **changes})


def simulated_run(machine, space=None, *, own=None, epoch_batches=None, has_step=True, **warmup):
    """What `tune()` knows of a simulated machine before its search begins.

    An epoch without length never ends. `own` is the user's configuration, `warmup` other fields of
    the `WarmupReport`.
    """
    dataset = Stream(int, 1) if epoch_batches is None else range(epoch_batches * machine.batch_size)
    data = DataSide(dataset=dataset, batch_size=machine.batch_size)
    step = (lambda model, batch: None) if has_step else None
    training = TrainingSide(device="cpu" if machine.step_cores else "cuda", train_step=step)
    limits, batch = Limits(memory_bytes=16 << 30), BatchCost(bytes=machine.batch_bytes, tensors=2)
    pins = (True, False) if machine.pin_s else (False,)
    space = space or Space(limits=limits, batch=batch, pin_memory=pins)
    known = simulated_warmup(machine, **warmup)
    first = {"fetch_s": known.first_fetch_s, "fetch_cpu_s": known.first_fetch_cpu_s}
    first["step_cores"] = float(machine.cores) if machine.step_cores else 1.0
    return Run(
        workload=Workload(data=data, training=training, own_config=own),
        space=replace(space, also=() if own is None else (own,)),
        context=Context(usable_cores=machine.cores, epoch_batches=epoch_batches, **first),
        warmup=known,
        machine=inspect_machine(),
    )


def simulated_search(probe, run, clock, study=None, sampler=None, *, budget_s=60.0, **given):
    """The search of `tune()` with this probe, up to the end of its rounds."""
    given = {"progress": make_progress(False), **given}
    search = Search(run, probe, study, sampler, budget=Budget(budget_s, clock), **given)
    search.decide()
    return search


def simulated_result(machine, *, seed=0, budget_s=60.0, epoch_batches=10_000, **given):
    """What `tune()` would return on this machine."""
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed, epoch_batches=epoch_batches)
    clock.advance(machine.probe_s)
    run = simulated_run(machine, epoch_batches=epoch_batches, **given)
    return assembled(simulated_search(probe, run, clock, budget_s=budget_s), clock())


def on_simulated_machines(
    monkeypatch, machine_of, probe_on=SimulatedProbe, warmup_of=lambda workload: {}
):
    """From now on `tune()` and `compare()` burst on the machine of a workload.

    A text in its place is what the first batch raises; `warmup_of` gives fields of its report.
    """
    clock = FakeClock()

    @contextlib.contextmanager
    def opened(workload, *_, **__):
        machine = machine_of(workload)
        if isinstance(machine, str):
            raise WorkloadError(machine, "the traceback")
        batches = None if workload.data.is_iterable else workload.data.batches_per_epoch()
        probe = probe_on(machine, clock, epoch_batches=batches)
        yield OpenProbe(probe=probe, warmup=simulated_warmup(machine, **warmup_of(workload)))

    for module in (tuner, comparer):
        monkeypatch.setattr(module, "open_probe", opened)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
