"""Would `tune()` choose as well from a training loop that runs on as from bursts, and sooner?

    python -m studies.live.engine --first 33000 --machines 100 --oracles /tmp/oracles

On the simulated machines of the regret study: AutoLoader's tuner, which may try as much as it likes because nothing is lost
in a probe, trains from 2 workers until it has settled; what it holds after 8 s, when it has settled, and after 60 s is
compared with the true best. The same machines are what `python -m studies.regret.simulated` tunes with bursts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from autotune_loader.live import spending
from studies.live.simulated import begun
from studies.regret.machines import oracle_of, random_machine, space_of

EARLY_S, LATE_S = 8.0, 60.0
UNLIMITED_S = 1e9
WITHIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """One machine: regrets, and seconds until it was settled."""

    kind: str
    seconds: float
    early: float
    settled: float
    late: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--oracles", type=Path, help="folder in which the true rates are kept from run to run")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.machines)
    with multiprocessing.Pool() as pool:
        outcomes = pool.starmap(run, [(seed, options.oracles) for seed in seeds], chunksize=2)
    for name, some in (
        ("all machines", outcomes),
        (
            "without steps of several threads, which a loader does not tune",
            [o for o in outcomes if o.kind != "cpu step"],
        ),
    ):
        print(row(name, some))
    return 0


def run(seed: int, oracles: Path | None) -> Settled:
    kind, machine = random_machine(seed)
    oracle = oracle_of(seed, machine, space_of(kind, machine), oracles)
    with mock.patch.object(spending, "CREDIT_S", UNLIMITED_S):
        clock, training, tuner = begun(machine, seed)
        wake, early = 0.0, None
        while clock() < LATE_S:
            if clock() >= wake:
                wake = tuner.look(clock())
            if early is None and clock() >= EARLY_S:
                early = tuner.best
            training.train()
    settled = next((event for event in tuner.history if event.kind == "settled"), None)
    first = tuner.best if settled is None else settled.config
    return Settled(
        kind=kind,
        seconds=LATE_S if settled is None else settled.seconds,
        early=oracle.regret((early or tuner.best).key()),
        settled=oracle.regret(first.key()),
        late=oracle.regret(tuner.best.key()),
    )


def row(name: str, outcomes: Sequence[Settled]) -> str:
    seconds = sorted(each.seconds for each in outcomes)
    figures = [
        f"{when}: {sum(value <= WITHIN for value in values) / len(values):.1%} within 2 %, p90 {_p90(values):.1%}"
        for when, values in (
            ("after 8 s", [each.early for each in outcomes]),
            ("settled", [each.settled for each in outcomes]),
            ("after 60 s", [each.late for each in outcomes]),
        )
    ]
    when = f"settled after {statistics.median(seconds):.1f} s, p90 {_p90(seconds):.1f} s"
    return f"{name} ({len(outcomes)}): {'; '.join(figures)}; {when}"


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


if __name__ == "__main__":
    sys.exit(main())
