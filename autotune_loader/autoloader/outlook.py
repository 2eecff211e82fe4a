"""What to expect of every number of workers and depth: `search`'s belief over what the log of a loop has.

It is asked in the midst of a training, so it takes 10 to 20 ms for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autotune_loader.autoloader.meter import Reached
from autotune_loader.search.belief import Belief, plain
from autotune_loader.search.space import Context, Space
from autotune_loader.values import LoaderConfig, Trial

NEAR = 0.01
"""The cheapest is taken of those that are expected to lose at most so much more than the best."""
CHEAP_QUEUE = 1 << 23
"""A queue of so many bytes costs nothing, as caches hold it; each doubling beyond is dearer."""


class Outlook:
    """What is expected of some configurations.

    Args:
        configs: All of them; the first is the best that is known.
        latest: What was measured of late, at least once, that of the best last.
        cores: Usable cores.
        step_s: A step that waits for nobody; 0 where none was seen.
        extra_s: What a configuration takes for each batch beside what the belief knows of, in seconds.
        batch_bytes: Bytes of a batch, 0 where that is unknown.

    Attributes:
        configs: Those that may help, in the order of `rates`, the first as it was given.
        rates: Samples/s that are expected.
    """

    def __init__(
        self,
        configs: Sequence[LoaderConfig],
        latest: Sequence[Reached],
        *,
        cores: int,
        step_s: float,
        extra_s: Callable[[LoaderConfig], float],
        batch_bytes: int,
    ) -> None:
        of, self._batch_bytes = latest[-1].of, batch_bytes
        context = Context(usable_cores=cores, step_s=step_s or None, fetch_s=of.service_s, fetch_cpu_s=of.service_cpu_s)
        trials = [Trial(number=n, config=plain(each.config), measurement=each.of) for n, each in enumerate(latest)]
        space = Space(max_workers=0, also=tuple(map(plain, configs)))
        belief = Belief(space, context, trials, observations=[each.observation for each in latest])
        useful = belief.twin.useful_workers if belief.twin is not None else math.inf
        known = set(belief.configs)
        self.configs = [
            config
            for config in configs
            if plain(config) in known and (config is configs[0] or config.num_workers <= useful)
        ]
        draws = belief.sustained.of([plain(config) for config in self.configs])
        extra = np.array([extra_s(config) for config in self.configs]) / of.batch_size
        draws = replace(draws, paths=draws.paths - np.log1p(extra * np.exp(draws.paths)))
        self.rates = np.exp(draws.paths.mean(axis=0))
        self._losses = draws.losses.mean(axis=0)

    def cheapest(self, of: Sequence[int]) -> int:
        """Which of these is the cheapest that is expected to be as fast as the best of them."""
        least = min(self._losses[n] for n in of)
        return min((n for n in of if self._losses[n] <= least + NEAR), key=lambda n: self._cost(self.configs[n]))

    def _cost(self, config: LoaderConfig) -> tuple[int, int, int]:
        """Workers; doublings of a queue that is cheap; then the deeper queue is better: it hides what comes seldom."""
        if not config.num_workers:
            return 0, 0, 0
        queue = max(1, config.batches_in_flight * self._batch_bytes)
        return config.num_workers, max(0, math.ceil(math.log2(queue / CHEAP_QUEUE))), -(config.prefetch_factor or 0)


def counts(least: int, most: int) -> Iterator[int]:
    """Numbers of workers, four in each octave, with both ends."""
    octaves = math.ceil(math.log2(max(most, 1))) + 1
    yield from sorted(
        {least, most, *(n for each in range(4 * octaves) if least <= (n := round(2 ** (each / 4))) <= most)}
    )
