"""A whole search on a simulated machine, told as `tune()` tells one: no process, no waiting."""

from __future__ import annotations

from autotune_loader.decision.space import BatchCost, Limits, Space, consumer_thread_counts, max_useful_workers
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.assemble import assemble
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import Job, RunContext, SearchState
from autotune_loader.values.trial import Trial
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe


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
    clock.advance(3.5)
    on_cpu = machine.step_cores > 0
    data = DataSide(dataset=range(epoch_batches * machine.batch_size), batch_size=machine.batch_size)
    context = RunContext(
        workload=Workload(data=data, training=TrainingSide(device="cpu" if on_cpu else "cuda")),
        space=_space(machine),
        warmup=WarmupReport(
            step="simulated",
            samples=machine.batch_size,
            batch_bytes=machine.batch_bytes,
            batch_tensors=2,
            on_accelerator=False,
            first_fetch_s=machine.cpu_s + machine.wait_s,
            first_fetch_cpu_s=machine.cpu_s,
            default_threads=machine.cores,
        ),
        fingerprint=Fingerprint(usable_cores=machine.cores),
        usable_cores=machine.cores,
        notes=(),
        tolerance=0.02,
    )
    job = Job(
        usable_cores=machine.cores,
        default_threads=machine.cores,
        step_uses_cores=on_cpu,
        epoch_batches=epoch_batches,
    )
    options = TuneOptions(budget_s=budget_s, seed=seed)
    session = TuningSession(probe, context.space, options, job, clock=clock, started=0.0, listener=_Nobody())
    return assemble(session.run(), context, clock(), final=True)


def _space(machine: SimulatedMachine) -> Space:
    return Space(
        max_workers=max_useful_workers(machine.cores, machine.cpu_s + machine.wait_s, machine.cpu_s),
        consumer_threads=consumer_thread_counts(machine.cores, machine.cores) if machine.step_cores else (None,),
        limits=Limits(memory_bytes=machine.memory_limit_bytes or 16 << 30),
        batch=BatchCost(bytes=machine.batch_bytes, tensors=2),
    )


class _Nobody:
    def trial(self, state: SearchState, trial: Trial, seconds_left: float) -> None: ...

    def finals_round(self, number: int, rates: object, seconds_left: float) -> None: ...
