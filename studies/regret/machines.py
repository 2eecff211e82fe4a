"""The simulated machines of the studies, and the truth about each of them.

Oracles are pickled under the name of this module: it must be imported by name, never run.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path

from autotune_loader.search.rule import useful_workers
from autotune_loader.search.space import MOST_WORKERS, Space
from autotune_loader.values import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

# A first look at every configuration, and a long one at the fastest of them and at those that are chosen.
GLANCE_BATCHES, TRUTH_BATCHES, LONG_LOOKS = 800, 6000, 12
CORES = (4, 4, 8, 8, 16, 32, 64, 128)
MORE = 6
"""The oracle looks further by so many workers than the search does."""


def random_machine(seed: int) -> tuple[str, SimulatedMachine]:
    """A machine with a workload on it: 4 to 128 cores, 3 to 8 % noise per burst, drift and spikes."""
    rng = random.Random(seed)
    cores = rng.choice(CORES)
    kind = rng.choice(("cpu", "cpu", "wait", "wait tail", "mixed", "step", "cpu step", "in memory"))
    cpu_s, wait_s = 10 ** rng.uniform(-2.3, -0.7), 0.0
    step_s, step_cores = cpu_s / rng.uniform(1.5, 1.2 * cores), 0.0
    tail_share, cv = 0.0, rng.uniform(0.03, 0.3)
    if kind.startswith("wait"):
        cpu_s, wait_s = cpu_s * 0.05, cpu_s
        tail_share = 0.03 if kind == "wait tail" else 0.0
    elif kind == "mixed":
        wait_s = cpu_s * rng.uniform(0.3, 2.0)
    elif kind == "step":
        step_s = cpu_s * rng.uniform(0.8, 4.0)
    elif kind == "in memory":
        cpu_s, step_s = 10 ** rng.uniform(-3.7, -3.0), 10 ** rng.uniform(-3.5, -2.3)
    elif kind == "cpu step":
        cores = min(cores, 16)
        step_s = cpu_s * rng.uniform(0.5, 2.0) * (0.15 + 0.85 / cores)
        step_cores = float(cores)
    return kind, SimulatedMachine(
        cores=cores,
        cpu_s=cpu_s,
        wait_s=wait_s,
        service_cv=cv,
        tail_share=tail_share,
        step_s=step_s,
        step_cores=step_cores,
        receive_s=10 ** rng.uniform(-3.7, -2.7),
        alpha=rng.uniform(0.0, 0.1),
        beta=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.004))),
        start_s=0.1,
        worker_start_s=rng.uniform(0.01, 0.05),
        noise_sd=rng.uniform(0.03, 0.08),
        drift_per_hour=rng.uniform(-0.5, 0.5),
        spike_share=0.05,
    )


def looked_at(machine: SimulatedMachine) -> Space:
    """Where the oracle looks for the best: `tune()` may use 0 to 64 workers, and beyond some none can help."""
    most = useful_workers(
        fetch_s=machine.cpu_s + machine.wait_s,
        fetch_cpu_s=machine.cpu_s,
        loop_s=machine.step_s + machine.receive_s,
        cores=machine.cores,
    )
    return Space(max_workers=min(most + MORE, MOST_WORKERS))


class Oracle:
    """The rate that each configuration sustains in the long run, from one long undisturbed run of each.

    All runs are timed over the same batches, so that the luck of the draw is common to them, and both ends are averaged
    over a round of the workers. (600 batches after a start of each configuration's own were off by up to 10 % with heavy
    tails and by up to 7 % with 64 workers, and the maximum over a hundred such figures was off in one direction.)
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, space = machine, looked_at(machine)
        self._warm = 2 * space.max_workers * (max(space.prefetch_factors) + 1) + 1
        glances = {config: self._run(config, GLANCE_BATCHES) for config in space.candidates()}
        first = sorted(glances, key=lambda config: -glances[config])[:LONG_LOOKS]
        self._truths = {config: self._run(config, TRUTH_BATCHES) for config in first}
        self.fastest = max(self._truths, key=lambda config: self._truths[config])

    def regret(self, config: LoaderConfig) -> float:
        """1 - rate / the best rate there is."""
        plain = config.key()
        if plain not in self._truths:
            self._truths[plain] = self._run(plain, TRUTH_BATCHES)
        return max(0.0, 1 - self._truths[plain] / self._truths[self.fastest])

    def _run(self, config: LoaderConfig, batches: int) -> float:
        # A fresh probe: the event simulation itself, without noise, drift and spikes.
        return SimulatedProbe(self._machine, FakeClock()).truth(config, batches=batches, warm=self._warm)


def oracle_of(seed: int, machine: SimulatedMachine, kept: Path | None) -> Oracle:
    """The oracle of a machine; taken from, or put into, a folder of those that were computed before."""
    path = None if kept is None else kept / f"oracle_{seed}.pkl"
    if path is not None and path.exists():
        oracle: Oracle = pickle.loads(path.read_bytes())
        return oracle
    oracle = Oracle(machine)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(oracle))
    return oracle
