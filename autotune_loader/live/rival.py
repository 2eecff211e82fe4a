"""Has something read better than what is to be settled on? Blocks an hour or a neighbour apart do not tell; two in a row do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autotune_loader.decision.evidence import Evidence
from autotune_loader.live.block_source import waiting_share
from autotune_loader.values.config import LoaderConfig

DENIED = 2.0
"""Standard deviations by which a rate must be higher ..."""
BLOCK_SD = 0.05
"""... of which two blocks differ by so much (relative) beyond what their own batches show."""
WAITS = 0.05
"""A loop that waits for more of its time than this, and for less than half as much with another one, may be faster there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What may be faster than a choice."""

    config: LoaderConfig
    is_faster: bool
    """Whether its latest block was; else the choice's loop waited, and its own hardly did."""
    again: LoaderConfig | None
    """What is to be observed again, so that the latest blocks of both follow each other; None where they do."""


def denied_by(log: Iterable[Evidence], choice: LoaderConfig) -> Rival | None:
    """The configuration whose latest block denies that the choice is the best; None where none does.

    Args:
        log: blocks in their order.
        choice: what is to be settled on.
    """
    latest = {each.key: (number, each) for number, each in enumerate(log)}
    latest = {key: (number, each) for key, (number, each) in latest.items() if each.measurement is not None}
    if choice.key() not in latest:
        return None
    place, own = latest.pop(choice.key())
    waits = _waiting(own)
    for when, rival in sorted(latest.values(), key=lambda each: -each[1].log_rate):
        is_beside = abs(when - place) == 1
        gain = rival.log_rate - own.log_rate
        may_be = rival.config.num_workers > 0 and waits > WAITS and _waiting(rival) < waits / 2
        is_faster = gain > (0.0 if may_be else DENIED * math.hypot(rival.own_sd, own.own_sd, 2**0.5 * BLOCK_SD))
        if is_faster or (may_be and not is_beside):
            older = rival if when < place else own
            return Rival(config=rival.config, is_faster=is_faster, again=None if is_beside else older.config)
    return None


def _waiting(seen: Evidence) -> float:
    if seen.measurement is None or not seen.config.num_workers:  # alone it waits for its own fetches, as it must
        return 0.0
    return waiting_share(seen.measurement)
