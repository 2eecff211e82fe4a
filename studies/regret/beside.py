"""Does a neighbour change which configuration is best? `python -m studies.regret.beside tutorial CONFIG CONFIG`.

Two configurations, as `loader.json` names them, take turns with neighbours that burn 0 to 50 % of two cores, and without them.
The machine must do nothing else. Takes about two minutes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from autotune_loader.config import LoaderConfig
from autotune_loader.stats import Interval, Round, paired_ratio
from studies.regret.bench import Bench, Timing
from studies.regret.configurations import asked_for
from studies.regret.load import neighbours
from studies.regret.oracle import ROUND_S, config_of, key

ROUNDS = 6
NEIGHBOURS_SEED = 2000


def ratio_in_turns(workload: str, configs: Sequence[LoaderConfig], *, loaded: bool, rounds: int = ROUNDS) -> Interval:
    """Rate of the first of two configurations over that of the second, with its 95 % interval."""
    first, second = map(key, configs)
    measured = []
    with neighbours(seed=NEIGHBOURS_SEED) if loaded else contextlib.nullcontext(), Bench(workload) as bench:
        for number in range(rounds):
            timing = Timing(clock="steady", seconds=ROUND_S, seed=number)
            order = random.Random(number).sample([first, second], 2)
            measured.append(Round(rates={each: bench.time(config_of(each), timing).samples_per_s for each in order}))
    return paired_ratio(measured, first, second)


def main() -> None:
    workload, configs = asked_for("studies.regret.beside", __doc__, 2)
    for loaded in (True, False):
        ratio = ratio_in_turns(workload, configs, loaded=loaded)
        where = "beside neighbours" if loaded else "alone"
        print(f"{where:18} {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}, {ratio.count} rounds)")


if __name__ == "__main__":
    main()
