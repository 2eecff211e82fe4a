"""The ranks of one job tune as one: rank 0 decides, all change at the same batch, the rank that waits most is what counts.

    rank 0    order (configuration, from batch N on) ──► store ──► ... own block ... ──► the worst of all blocks
    rank r    look, now and then: an order? ──► at batch N: the same change ──► own block ──► store

Nothing here waits: the training's own gradients keep the ranks within a batch of each other, and what they say goes through
the job's store (`machine.ranks`), never by a collective of its group. A loader that one rank has alone gives orders to nobody.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from autotune_loader.live.blocks import Block, Training, waiting_share
from autotune_loader.machine.ranks import Link
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement

AHEAD_S = 0.5
"""An order is given so long before its batch comes ..."""
POLL_S = 0.1
"""... and so often the ranks ask for one."""
PATIENCE_S = 10.0
"""Rank 0 waits no longer for another's figures than this after its own."""
MOST_TRACES = 64
"""Batches of a block that travel."""

log = logging.getLogger(__name__)

Steps = Generator[float, None, None]
"""Yields for how many seconds the loop is to be left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks run from a batch on."""

    config: LoaderConfig
    batch: int


class Alone:
    """Changes one training run.

    Args:
        training: what is changed.
    """

    def __init__(self, training: Training) -> None:
        self._training = training

    def is_ready(self) -> bool:
        """Whether other configurations may be tried."""
        return not self._training.awaits_proof

    def change_to(self, config: LoaderConfig) -> Steps:
        """Returns once training was told to run this."""
        if config.key() != self._training.config.key():
            self._training.change_to(config)
        yield from ()

    def counting(self, own: Measurement) -> Generator[float, None, Measurement]:
        """What counts of a block."""
        yield from ()
        return own


class Leader(Alone):
    """Changes all ranks as one, each of them at a batch that none has reached yet."""

    def __init__(self, training: Training, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(training)
        self._link, self._clock, self._orders = link, clock, 0

    def is_ready(self) -> bool:
        return super().is_ready() and self._link.from_others("ready", bool) is not None

    def change_to(self, config: LoaderConfig) -> Steps:
        traces = self._training.traces
        recent = traces.block(traces.end - 16)
        period_s = (recent[-1].step_end - recent[0].requested) / len(recent) if recent else AHEAD_S
        batch = traces.end + math.ceil(AHEAD_S / max(period_s, 1e-6)) + 2
        self._link.say(f"order{self._orders}", Order(config=config, batch=batch))
        self._orders += 1
        while traces.end < batch:
            yield 0.0
        yield from super().change_to(config)

    def counting(self, own: Measurement) -> Generator[float, None, Measurement]:
        """That of the rank which waits most."""
        until = self._clock() + PATIENCE_S
        while (others := self._link.from_others(f"figures{self._orders - 1}", Measurement)) is None:
            if self._clock() > until:
                return own
            yield POLL_S
        worst: Measurement = max([own, *others], key=waiting_share)
        return worst


class Follower:
    """What every other rank does at its looks, in place of a `Tuner`."""

    def __init__(self, training: Training, link: Link) -> None:
        self._training, self._link = training, link
        self._steps, self._is_ready = self._follow(), False

    def look(self, now: float) -> float:
        """As `Tuner.look`."""
        from torch import distributed

        try:
            return now + next(self._steps)
        except distributed.DistError as error:  # rank 0 has ended, and the store with it
            log.info("rank 0 is gone, so nothing changes any more: %s", error)
            return math.inf

    def _follow(self) -> Steps:
        training = self._training
        for number in itertools.count():
            while (order := self._order(number)) is None:
                yield POLL_S
            while training.traces.end < order.batch:
                yield 0.0
            if training.may_run(order.config):
                is_new = order.config.key() != training.config.key()
                block = Block(training, order.config, is_new=is_new)
                if is_new:
                    training.change_to(order.config)
                yield from self._tell(block, number)

    def _order(self, number: int) -> Order | None:
        training, link = self._training, self._link
        if not self._is_ready and training.may_run(training.config.with_workers(training.config.num_workers + 1)):
            self._is_ready = True
            link.say("ready", True)
        order: Order | None = link.heard(f"order{number}", 0, Order)
        return order

    def _tell(self, block: Block, number: int) -> Steps:
        """What a block says, unless the next order comes first."""
        while (outcome := block.outcome()) is None and self._order(number + 1) is None:
            yield POLL_S
        if isinstance(outcome, Measurement):
            few = replace(outcome, traces=outcome.traces[-MOST_TRACES:])
            self._link.say(f"figures{number}", few)
