"""Seven bottlenecks on simulated machines of several sizes, searched as `tune()` searches and judged as it judges."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.space import Space, max_useful_workers
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.results.loader_file import Advice, Verdict
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import Job, SearchState
from autotune_loader.values.config import LoaderConfig
from studies.verdict.outcomes import Outcome
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

CORES = (4, 8, 16, 32)
SCALES = (0.3, 1.0, 5.0)
"""Everything takes so many times as long."""
SEEDS = (0, 1)
# What the probe process takes to start.
START_S = 3.5
Injected = Callable[[int, float], SimulatedMachine]


def _machine(cores: int, scale: float, **seconds: float) -> SimulatedMachine:
    timed = {name: value * scale if name.endswith("_s") else value for name, value in seconds.items()}
    return SimulatedMachine(cores=cores, noise_sd=0.03, alpha=0.03, service_cv=0.2, **timed)  # type: ignore[arg-type]


def cpu(cores: int, scale: float) -> SimulatedMachine:
    return _machine(cores, scale, cpu_s=0.04, step_s=0.04 / cores / 3, receive_s=0.0001)


def wait(cores: int, scale: float) -> SimulatedMachine:
    return _machine(cores, scale, cpu_s=0.0002, wait_s=0.1, step_s=0.1 / (4 * cores) / 3, receive_s=0.00005)


def storage(cores: int, scale: float) -> SimulatedMachine:
    """Decodes a little of what it mostly waits for."""
    return _machine(cores, scale, cpu_s=0.006, wait_s=0.1, step_s=0.1 / (4 * cores) / 3, receive_s=0.0001)


def transport(cores: int, scale: float) -> SimulatedMachine:
    large = _machine(cores, scale, cpu_s=0.012, step_s=0.001, receive_s=0.006)
    return replace(large, batch_bytes=64 << 20)


def step(cores: int, scale: float) -> SimulatedMachine:
    return _machine(cores, scale, cpu_s=0.02, step_s=0.03, receive_s=0.0002)


def memory(cores: int, scale: float) -> SimulatedMachine:
    """Waits, and has room for a quarter of the workers that would help."""
    hungry = _machine(cores, scale, cpu_s=0.0002, wait_s=0.1, step_s=0.1 / (4 * cores) / 3, receive_s=0.00005)
    return replace(hungry, worker_bytes=500 << 20, memory_limit_bytes=(500 << 20) * (1 + max(2, cores // 2)))


def in_memory(cores: int, scale: float) -> SimulatedMachine:
    return replace(_machine(cores, scale, cpu_s=0.0003, step_s=0.0002, receive_s=0.0005), batch_bytes=16 << 10)


INJECTED: dict[str, tuple[Injected, tuple[str, ...]]] = {
    "cpu": (cpu, ("cpu",)),
    "wait": (wait, ("wait",)),
    "storage": (storage, ("wait",)),
    "transport": (transport, ("transport",)),
    "step": (step, ("step",)),
    "memory": (memory, ("memory",)),
    "in-memory": (in_memory, ("in_memory",)),
}


class _Nobody:
    def trial(self, *_: object) -> None: ...

    def finals_round(self, *_: object) -> None: ...


def searched(
    machine: SimulatedMachine, seed: int, max_workers: int | None = None
) -> tuple[SearchState, SimulatedProbe]:
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed)
    clock.advance(START_S)
    useful = max_useful_workers(machine.cores, machine.cpu_s + machine.wait_s, machine.cpu_s)
    found = TuningSession(
        probe,
        Space(max_workers=max_workers or useful),
        TuneOptions(budget_s=60.0, seed=seed),
        Job(usable_cores=machine.cores, default_threads=machine.cores, step_uses_cores=False),
        clock=clock,
        started=0.0,
        listener=_Nobody(),
    ).run()
    return found, probe


def judged(found: SearchState, cores: int) -> tuple[Verdict, tuple[Advice, ...], LoaderConfig]:
    assert found.finals is not None
    best = found.finals.winner
    evidence = Evidence(
        best=best,
        measurement=found.finals.measurement,
        rate=found.finals.rate,
        ceiling=found.ceiling_of(best),
        usable_cores=cores,
        on_accelerator=True,
        epoch_batches=None,
        trials=found.trials,
        has_batched_fetch=False,
        twin=fit_twin([(t.config, t.measurement) for t in found.trials if t.measurement is not None], found.context),
        cached_steps=tuple(found.ceilings.values()),
    )
    verdict = judge(evidence)
    return verdict, advise(evidence, verdict), best


def followed(injected: str, machine: SimulatedMachine, best: LoaderConfig) -> tuple[SimulatedMachine, int | None]:
    """The machine after the first advice, and how many workers may be tried then."""
    changed = {
        "cpu": replace(machine, cpu_s=machine.cpu_s / 2),
        "wait": machine,
        "storage": machine,
        "transport": replace(machine, receive_s=machine.receive_s / 4, batch_bytes=machine.batch_bytes // 4),
        "step": replace(machine, step_s=machine.step_s / 2),
        "memory": replace(machine, worker_bytes=machine.worker_bytes // 4),
        "in-memory": replace(machine, cpu_s=machine.cpu_s / 5),
    }[injected]
    return changed, 2 * best.num_workers if injected in ("wait", "storage") else None


def study(injected: str, cores: int, scale: float, seed: int) -> Outcome:
    make, expected = INJECTED[injected]
    machine = make(cores, scale)
    found, probe = searched(machine, seed)
    verdict, advice, best = judged(found, cores)
    changed, workers = followed(injected, machine, best)
    later, probe_later = searched(changed, seed + 100, workers)
    assert later.finals is not None
    truth = probe.truth(replace(best, persistent_workers=False), batches=600)
    gained = probe_later.truth(replace(later.finals.winner, persistent_workers=False), batches=600)
    return Outcome(
        injected=injected,
        expected=expected,
        size=f"{cores} cores, x{scale}, seed {seed}",
        verdict=verdict.binding,
        best=str(best),
        samples_per_s=truth,
        advice=advice[0].action if advice else None,
        promised=advice[0].expected_gain if advice else None,
        gain=gained / truth - 1,
    )


def jobs() -> list[tuple[str, int, float, int]]:
    return list(itertools.product(INJECTED, CORES, SCALES, SEEDS))
