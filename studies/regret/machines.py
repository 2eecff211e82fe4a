"""The simulated machines of the studies, and the truth about each of them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune_loader.values import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

# Where the oracle looks, whatever the search looks at.
COUNTS = (*range(17), *range(18, 33, 2), *range(36, 65, 4))
PREFETCH_FACTORS = (1, 2, 4, 8)
HOPELESS = 0.7
"""Other queues are not looked at for a number of workers whose rate with a prefetch of 2 is this far below the best."""
# A first look at every configuration, and a long one at the fastest of them and at those that are chosen.
GLANCE_BATCHES, TRUTH_BATCHES, LONG_LOOKS = 800, 6000, 12
CORES = (4, 4, 8, 8, 16, 32, 64, 128)
FOREIGN = ("apart", "compile", "depth", "locking", "noisy", "pinning", "receipt", "slow", "smt", "storage")
"""Kinds of machines whose laws are not the twin's; by turns, so that seeds in a row have as many of each."""


def random_machine(seed: int) -> tuple[str, SimulatedMachine]:
    """A machine with a workload on it: 4 to 128 cores, 3 to 8% noise per burst, drift and spikes."""
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
        cores=cores, cpu_s=cpu_s, wait_s=wait_s, service_cv=cv, tail_share=tail_share, step_s=step_s, step_cores=step_cores,
        receive_s=10 ** rng.uniform(-3.7, -2.7), alpha=rng.uniform(0.0, 0.1),
        beta=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.004))), start_s=0.1, worker_start_s=rng.uniform(0.01, 0.05),
        noise_sd=rng.uniform(0.03, 0.08), drift_per_hour=rng.uniform(-0.5, 0.5), spike_share=0.05,
    )  # fmt: skip


def foreign_machine(seed: int) -> tuple[str, SimulatedMachine]:
    """A machine with a law that the twin lacks, a start of a minute, slow batches, or bursts that scatter by 10 to 20%.

    `apart`: noise hits workers alone, the loop has its own. `depth`: each doubling of the queue makes all slower. `pinning`: a
    thread beside the loop pins large batches, and slows the step down. `locking`: it also locks pages within bursts.
    """
    rng, kind = random.Random(seed), FOREIGN[seed % len(FOREIGN)]
    cores, cpu_s = rng.choice((8, 16, 32, 64)), 10 ** rng.uniform(-2.0, -1.0)
    step_s, receive_s, noise_sd = cpu_s / rng.uniform(2, cores), 10 ** rng.uniform(-3.7, -3.0), rng.uniform(0.03, 0.06)

    def pinning() -> dict[str, float]:
        pin_s = cpu_s / rng.uniform(2, cores)
        in_loop, copied = rng.uniform(1.0, 2.0), rng.uniform(0.3, 1.2)
        size = {"pin_s": pin_s, "copy_s": copied * pin_s, "batch_bytes": round(3e9 * pin_s)}
        return {**size, "step_s": pin_s * rng.uniform(0.3, 1.2), "in_loop": in_loop, "cores": min(cores, 32)}

    more = {
        "apart": lambda: {"noise_is_of_workers": True, "noise_sd": rng.uniform(0.04, 0.1)},
        "compile": lambda: {"probe_s": 60.0},
        "depth": lambda: {"depth_growth": rng.uniform(0.01, 0.04)},
        "locking": lambda: {**(size := pinning()), "lock_s": 5.0 * size["pin_s"]},
        "noisy": lambda: {"noise_sd": rng.uniform(0.1, 0.2)},
        "pinning": pinning,
        "receipt": lambda: {"step_s": 0.3 * step_s, "receive_growth": rng.choice((0.02, 0.05, 0.2))},
        "slow": lambda: {"cores": 32, "cpu_s": rng.uniform(1.0, 8.0), "step_s": rng.uniform(0.3, 2.0)},
        "smt": lambda: {"alpha": 0.0, "full_cores": cores / 2, "further_core": 0.3},
        "storage": lambda: {"cpu_s": 0.1 * cpu_s, "wait_s": cpu_s, "servers": rng.choice((4, 8, 16))},
    }[kind]()
    machine = SimulatedMachine(
        cores=cores, cpu_s=cpu_s, service_cv=rng.uniform(0.03, 0.3), step_s=step_s, receive_s=receive_s,
        alpha=rng.uniform(0.0, 0.1), start_s=0.1, worker_start_s=rng.uniform(0.01, 0.05), noise_sd=noise_sd,
        drift_per_hour=rng.uniform(-0.5, 0.5), spike_share=0.05,
    )  # fmt: skip
    return kind, replace(machine, **more)


SLOW = {
    f"fetch {fetch_s:.0f} s, step 0.3 s": (fetch_s, 0.3, 6 + 2 * fetch_s)
    for fetch_s in (1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 15.0)
}
SLOW |= {
    f"fetch {4 * step_s:.0f} s, step {step_s:.0f} s": (4 * step_s, step_s, 6 + 6 * step_s) for step_s in (1.0, 2.0, 5.0)
}
SLOW |= {f"warm after {probe_s:.0f} s": (0.2, 0.05, probe_s) for probe_s in (30.0, 58.0, 70.0, 180.0)}
"""Seconds of a fetch, of a step, and until the probe is warm; by turns, 14 seeds have each."""


def slow_machine(seed: int) -> tuple[str, SimulatedMachine]:
    """Slow batches and long starts on 32 cores, as of a user who has DataLoader's default of no workers."""
    name = list(SLOW)[seed % len(SLOW)]
    cpu_s, step_s, probe_s = SLOW[name]
    return name, SimulatedMachine(
        cores=32, worker_start_s=0.05, noise_sd=0.03, cpu_s=cpu_s, step_s=step_s, probe_s=probe_s
    )


LAWS = {"usual": random_machine, "foreign": foreign_machine, "slow": slow_machine}
Setting = tuple[int, int, bool]
"""Workers, prefetch, and whether batches are pinned."""
Truths = dict[Setting, float]
"""Samples/s by setting."""


class Oracle:
    """The rate that each configuration sustains in the long run, from one long undisturbed run of each.

    All runs are timed over the same batches, so that the luck of the draw is common to them, and both ends are averaged
    over a round of the workers. (600 batches after a start of each configuration's own were off by up to 10% with heavy
    tails and by up to 7% with 64 workers, and the maximum over a hundred such figures was off in one direction.)
    """

    def __init__(self, machine: SimulatedMachine, truths: Truths | None = None) -> None:
        self._machine, self.truths = machine, dict(truths or {})
        for setting in () if truths else self._fastest_at_a_glance():
            self._truth(setting)
        self._best = max(self.truths.values())

    def regret(self, config: LoaderConfig) -> float:
        """1 - rate / the best rate there is."""
        setting = config.num_workers, config.prefetch_factor or 0, config.pin_memory and self._machine.pin_s > 0
        return max(0.0, 1 - self._truth(setting) / self._best)

    def _fastest_at_a_glance(self) -> Sequence[Setting]:
        kinds = (False, True) if self._machine.pin_s else (False,)
        shallow = [(workers, 2 if workers else 0, pinned) for workers in COUNTS for pinned in kinds]
        glances = {each: self._run(each, GLANCE_BATCHES) for each in shallow}
        worth = [each for each, rate in glances.items() if each[0] and rate > HOPELESS * max(glances.values())]
        for each in ((workers, prefetch, pinned) for workers, _, pinned in worth for prefetch in PREFETCH_FACTORS):
            if each not in glances:
                glances[each] = self._run(each, GLANCE_BATCHES)
        return sorted(glances, key=lambda each: -glances[each])[:LONG_LOOKS]

    def _truth(self, setting: Setting) -> float:
        if setting not in self.truths:
            self.truths[setting] = self._run(setting, TRUTH_BATCHES)
        return self.truths[setting]

    def _run(self, setting: Setting, batches: int) -> float:
        # A fresh probe: the event simulation itself, without noise, drift and spikes.
        warm = 2 * max(COUNTS) * (max(PREFETCH_FACTORS) + 1) + 1
        workers, prefetch, pinned = setting
        config = replace(LoaderConfig().with_workers(workers, prefetch or None), pin_memory=pinned)
        return SimulatedProbe(self._machine, FakeClock()).truth(config, batches=batches, warm=warm)


def oracle_of(laws: str, seed: int, machine: SimulatedMachine, kept: Path | None) -> Oracle:
    """The oracle of a machine; taken from, or put into, a folder of those that were computed before."""
    path = None if kept is None else kept / f"{laws}_{seed}.json"
    if path is not None and path.exists():
        return Oracle(machine, {(*setting,): rate for *setting, rate in json.loads(path.read_text())})
    oracle = Oracle(machine)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}")
        begun.write_text(json.dumps([[*each, rate] for each, rate in oracle.truths.items()]))
        begun.replace(path)
    return oracle
