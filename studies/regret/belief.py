"""Does the search know what it does not know? `python -m studies.regret.belief --first 19000 --machines 300`.

What is believed after all bursts of a simulated run, those of the finals included, against the truth: how many of the wrong
choices are among those of which the belief expects to lose most, and how far it errs between many workers and some fewer.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.space import Space
from autotune_loader.probe.protocol import Probe
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from studies.regret.machines import oracle_of, random_machine, space_of
from studies.regret.over_time import NEAR
from studies.regret.simulated import by_search
from tests.support import SimulatedMachine

# Of all machines, the share whose choice is the most doubtful.
DOUBTFUL = 0.2
# Compared with the most workers of the space: so many times as many.
FEWER = (0.88, 0.7)
LARGE_CORES = 64


@dataclass
class _Recorder:
    """A probe that keeps every burst of the one that it asks."""

    probe: Probe = field(init=False)
    evidence: list[Evidence] = field(default_factory=list)
    step_s: dict[int | None, float] = field(default_factory=dict)

    def of(self, probe: Probe) -> Probe:
        self.probe = probe
        return self

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        outcome = self.probe.burst(config, plan)
        if isinstance(outcome, Measurement):
            self.evidence.append(Evidence(config=config, outcome=outcome))
        return outcome

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        outcome = self.probe.step_ceiling(consumer_threads, plan)
        if isinstance(outcome, Measurement):
            self.step_s[consumer_threads] = outcome.step_s
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One machine: what was chosen, and what was believed then."""

    regret: float
    expected_loss: float
    """Of the choice against the best that may be, relatively."""
    errors: dict[float, tuple[float, float]]
    """By `FEWER`, on a large machine bound by its workers: error of ln(rate of the most / of fewer) and its believed standard
    deviation."""


def look(seed: int, oracles: Path | None) -> Looked:
    """The belief after one run, against the truth."""
    kind, machine = random_machine(seed)
    space = space_of(kind, machine)
    oracle = oracle_of(seed, machine, space, oracles)
    recorder = _Recorder()
    chosen = by_search("auto", 60.0, recorder.of)(machine, space, kind, seed, math.inf).config
    beliefs = Beliefs(space, _context(kind, machine, recorder))
    for evidence in recorder.evidence:
        beliefs.log.add(evidence)
    known = beliefs.posterior()
    assert known is not None
    plain = chosen.key()
    loss = known.losses[:, known.configs.index(plain)].mean() if plain in known.configs else 0.0
    errors = {}
    if kind in ("cpu", "mixed") and machine.cores >= LARGE_CORES:
        for share in FEWER:
            most, fewer = _pair(known, space, share)
            truth = math.log((1 - oracle.regret(most)) / (1 - oracle.regret(fewer)))
            mean, sd = known.ratio(known.configs.index(most), known.configs.index(fewer))
            errors[share] = (mean - truth, sd)
    return Looked(regret=oracle.regret(chosen), expected_loss=float(loss), errors=errors)


def _context(kind: str, machine: SimulatedMachine, recorder: _Recorder) -> TwinContext:
    cores = float(machine.cores) if kind == "cpu step" else 1.0
    return TwinContext(usable_cores=machine.cores, consumer_cores=cores, step_s=tuple(recorder.step_s.items()))


def _pair(known: Posterior, space: Space, share: float) -> tuple[LoaderConfig, LoaderConfig]:
    """The most workers with the deepest queue, and so many times as many."""
    deepest = [config for config in known.configs if config.prefetch_factor == max(space.prefetch_factors)]
    most = max(deepest, key=lambda config: config.num_workers)
    return most, min(deepest, key=lambda config: abs(config.num_workers - share * most.num_workers))


def report(looked: list[Looked]) -> str:
    """What came of all machines, in sentences."""
    doubtful = sorted(looked, key=lambda each: -each.expected_loss)[: round(DOUBTFUL * len(looked))]
    wrong = sum(each.regret > NEAR for each in looked)
    lines = [
        f"{len(looked)} machines, {wrong} choices lose more than {NEAR:.0%}; "
        f"{sum(each.regret > NEAR for each in doubtful)} of these are among the {DOUBTFUL:.0%} most doubtful, "
        f"which are expected to lose {doubtful[-1].expected_loss:.2%} or more"
    ]
    for share in FEWER:
        found = [each.errors[share] for each in looked if share in each.errors]
        if found:
            lines.append(
                f"most workers against {share:g} times as many, {len(found)} machines with {LARGE_CORES} cores or more: "
                f"error {_root_mean_square([error for error, _ in found]):.1%}, "
                f"believed {_root_mean_square([sd for _, sd in found]):.1%}"
            )
    return "\n".join(lines)


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.belief", description=__doc__)
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--oracles", type=Path, help="folder in which the true rates are kept from run to run")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.machines)
    with multiprocessing.Pool(arguments.processes) as pool:
        print(report(pool.starmap(look, [(seed, arguments.oracles) for seed in seeds], chunksize=2)))


if __name__ == "__main__":
    main()
