"""A probe that answers from a record of real bursts."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

_Key = TypeVar("_Key", bound=Hashable)


class ReplayProbe:
    """A `Probe` that answers from a record: each configuration's answers in the order in which they were recorded.

    Args:
        bursts: answers by configuration; asked for more often than recorded, the probe refuses.
        step_ceilings: answers by consumer threads, replayed in the same way.

    Raises:
        LookupError: (when asked) the configuration was not recorded, or not so often; the message names what was.
    """

    def __init__(
        self,
        bursts: Mapping[LoaderConfig, Sequence[Measurement | Failure]],
        step_ceilings: Mapping[int | None, Sequence[Measurement | Failure]] | None = None,
    ) -> None:
        self.asked: list[LoaderConfig] = []
        """Every configuration that was asked for, in order."""
        self._bursts = {config: deque(answers) for config, answers in bursts.items()}
        self._ceilings = {threads: deque(answers) for threads, answers in (step_ceilings or {}).items()}

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """The next answer recorded for `config`, whatever the plan."""
        self.asked.append(config)
        return _next(self._bursts, config, "burst")

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        """The next step ceiling recorded for `consumer_threads`, whatever the plan."""
        return _next(self._ceilings, consumer_threads, "step ceiling")


def _next(record: Mapping[_Key, deque[Measurement | Failure]], key: _Key, what: str) -> Measurement | Failure:
    if key not in record:
        known = "; ".join(map(str, record)) or "nothing"
        raise LookupError(f"no {what} of {key} was recorded; recorded: {known}")
    if not record[key]:
        raise LookupError(f"every {what} recorded of {key} was replayed already; record more of them")
    return record[key].popleft()
