"""Observations of configurations, from any source: the only thing that beliefs rest on.

A source (bursts before training, blocks of training itself, a simulated machine) makes `Evidence`; the log keeps it in order.
Nothing here knows a clock or a process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Z_95

Kind = Literal["steady", "epoch"]
"""A rate in the midst of training, or one of whole epochs: with start-up and the gaps between them."""
Phase = Literal["search", "compare"]
"""Rates that are reported come from comparisons only: a search keeps the luckiest of many."""

POOREST_BURST_SD = 0.2
"""Relative standard deviation of a burst whose few batches give no better interval: finals in studies/regret scatter by 7 to
12 % as a rule, by 20 % beside neighbours."""
NEIGHBOURS_SD = 0.5
"""Where other processes took a share of the cores, rates differ by this much of that share (relative standard deviation):
in the next burst they take anything from none to twice as much."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """One observation of one configuration."""

    config: LoaderConfig
    """As it ran."""
    outcome: Measurement | Failure
    kind: Kind = "steady"
    phase: Phase = "search"
    group: int = 0
    """What was observed together, so that it can be compared in pairs: the number of a round, or of an A-B block."""

    @property
    def key(self) -> LoaderConfig:
        """What this says something about."""
        return self.config.key()

    @property
    def measurement(self) -> Measurement | None:
        return self.outcome if isinstance(self.outcome, Measurement) else None

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None

    @property
    def log_rate(self) -> float:
        """Logarithm of samples/s; -inf where nothing was delivered."""
        rate = 0.0 if self.measurement is None else self.measurement.samples_per_s.value
        return math.log(rate) if rate > 0 else -math.inf

    @property
    def own_sd(self) -> float:
        """Standard deviation of `log_rate`, as the batches of this observation show it."""
        if self.measurement is None or self.log_rate == -math.inf:
            return POOREST_BURST_SD
        rate = self.measurement.samples_per_s
        return min(math.log(rate.high / rate.value) / Z_95, POOREST_BURST_SD)

    @property
    def neighbours_sd(self) -> float:
        """And what other processes on the same cores add to it."""
        share = None if self.measurement is None else self.measurement.foreign_cpu_share
        return NEIGHBOURS_SD * (share or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is wanted of a source."""

    phase: Phase = "search"
    kind: Kind = "steady"
    group: int = 0
    """Observations of one group read the same samples."""


class EvidenceSource(Protocol):
    """Observes configurations: the only part of the tuner that touches the world."""

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        """One observation. A configuration that fails is an answer, not an exception."""
        ...


class EvidenceLog:
    """All evidence in the order in which it came; of comparisons, groups can be taken out that were disturbed."""

    def __init__(self) -> None:
        self._all: list[Evidence] = []
        self._left_out: frozenset[int] = frozenset()

    @property
    def version(self) -> tuple[int, frozenset[int]]:
        """Equal for equal contents."""
        return len(self._all), self._left_out

    def add(self, evidence: Evidence) -> None:
        self._all.append(evidence)

    def leave_out(self, groups: Collection[int]) -> None:
        """The groups of comparisons that say nothing, in place of those that were left out before."""
        self._left_out = frozenset(groups)

    def __iter__(self) -> Iterator[Evidence]:
        for each in self._all:
            if each.phase == "search" or each.group not in self._left_out:
                yield each

    def __len__(self) -> int:
        return len(self._all)
