"""`tune()` on every rank of a training job: rank 0 decides, all ranks run each burst at the same time, the slowest counts.

    rank 0    ask ──► own burst ──► outcomes of all ──► slowest ──► study ──► ask ... ──► result
    rank r    hear ─► own burst ──► tell ─────────────────────────────────► hear ... ──► result

They contend for cores, memory and storage as in training. Objects travel by collectives of torch.distributed on a gloo group.
A rank that raises, or is interrupted, leaves the group with its own error; the others end with torch's. A rank may load its
data for minutes before it calls: the others wait, and say for whom.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autotune_loader.bursts.protocol import Probe
from autotune_loader.results.result import TuningResult
from autotune_loader.values import BurstPlan, Failure, LoaderConfig, Measurement, TunerError

log = logging.getLogger(__name__)

FIRST_WORD_S, NEXT_WORD_S = 15.0, 30.0
"""Ranks of one job come within seconds, where none of them makes a dataset alone; a person looks after half a minute."""
LOOK_S = 0.1
"""Between two looks at who has come, each some commands to the job's store."""
EVERY_RANK = "every rank of the job has to call tune()"
_groups = itertools.count()


class Ranks:
    """This process among the ranks of its job."""

    def __init__(self, dist: Any, group: Any) -> None:
        self._dist, self._group, self.rank = dist, group, dist.get_rank()
        on_this_node = self.from_all(platform.node()).count(platform.node())
        self.environ = {**os.environ, "LOCAL_WORLD_SIZE": str(on_this_node)}  # not every launcher says it

    def from_all(self, value: Any) -> list[Any]:
        """What every rank says, on every rank."""
        said = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(said, value, group=self._group)
        return said

    def from_rank_0(self, *value: Any) -> tuple[Any, ...]:
        """What rank 0 says, on every rank."""
        said = [value]
        self._dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks | None]:
    """The ranks of this job while the block runs; None where this process trains alone. Every rank must come here."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
    from torch.distributed.rendezvous import rendezvous

    is_up = dist.is_available() and dist.is_initialized()
    is_launched = dist.is_available() and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    size = dist.get_world_size() if is_up else int(os.environ["WORLD_SIZE"]) if is_launched else 1
    if size < 2:
        yield None
        return
    rank, name = dist.get_rank() if is_up else int(os.environ["RANK"]), f"autotune_loader{next(_groups)}"
    with said_who_is_missing(rank, size) as missing:
        store = _get_default_store() if is_up else next(rendezvous("env://"))[0]
        # The job makes its own group later, with the same store: what is ours has names of its own.
        names = PrefixStore(name, store)
        await_all(names, rank, size, missing)
        if not is_up:
            dist.init_process_group("gloo", store=names, rank=rank, world_size=size)
        group = dist.new_group(backend="gloo")
    try:
        yield Ranks(dist, group)
    finally:
        dist.destroy_process_group(group if is_up else None)


@contextlib.contextmanager
def said_who_is_missing(rank: int, size: int) -> Iterator[list[int]]:
    """While the block waits for the other ranks, the log says for which: those in the list, as long as they are in it."""
    missing, has_come = [each for each in range(size) if each != rank], threading.Event()

    def say() -> None:
        begun, wait_s = time.monotonic(), FIRST_WORD_S
        while not has_come.wait(wait_s):
            wait_s, who = NEXT_WORD_S, names_of_missing(rank, size, list(missing))
            if who is not None:
                waited_s = time.monotonic() - begun
                log.warning("tune() on rank %d has waited %.0f s for %s: %s.", rank, waited_s, who, EVERY_RANK)

    speaker = threading.Thread(target=say, name="autotune-loader-ranks", daemon=True)
    speaker.start()
    try:
        yield missing
    finally:
        has_come.set()
        speaker.join()


def names_of_missing(rank: int, size: int, missing: Sequence[int]) -> str | None:
    """The ranks that have not come, as the first of those that have says it; None from the others."""
    speaks = missing and rank == min({*range(size)} - {*missing})
    return f"rank {', '.join(map(str, missing))}" if speaks else None


def await_all(store: Any, rank: int, size: int, missing: list[int]) -> None:
    """Wait until every rank has come here, as long as the job's store waits; `missing` has those that have not.

    Raises:
        TunerError: some have not come.
    """
    keys = [f"rank{each}" for each in range(size)]
    store.set(keys[rank], "here")
    until = time.monotonic() + store.timeout.total_seconds()
    while not store.check(keys):  # where a wait of the store ends, torch prints a traceback
        missing[:] = [each for each, key in enumerate(keys) if not store.check([key])]
        if time.monotonic() > until:
            raise TunerError(f"rank {', '.join(map(str, missing))} has not called tune(): {EVERY_RANK}")
        time.sleep(LOOK_S)


def decided(ranks: Ranks | None, probe: Probe, decide: Callable[[Probe], TuningResult]) -> TuningResult:
    """What rank 0 decides with bursts on all ranks, on every rank; alone, what this process decides."""
    if ranks is None:
        return decide(probe)
    if ranks.rank == 0:
        result = decide(_Everywhere(ranks, probe))
        ranks.from_rank_0(None, result.to_dict())
        return result
    while (asked := ranks.from_rank_0())[0] is not None:
        ranks.from_all(_outcome(probe, *asked))
    return TuningResult.from_dict(asked[1])


class _Everywhere:
    """A `Probe` on rank 0 whose every burst runs on all ranks at once; the slowest rank's measurement is the answer."""

    def __init__(self, ranks: Ranks, own: Probe) -> None:
        self._ranks, self._own = ranks, own

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._ask("burst", plan, config)

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        return self._ask("step_ceiling", plan)

    def hand_over(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._ask("hand_over", plan, config)

    def _ask(self, name: str, plan: BurstPlan, *config: LoaderConfig) -> Measurement | Failure:
        # A rank that closes its window early would leave the cores to the others.
        asked = self._ranks.from_rank_0(name, *config, replace(plan, min_s=plan.max_s))
        return slowest(self._ranks.from_all(_outcome(self._own, *asked)))


def _outcome(probe: Probe, name: str, *arguments: Any) -> Any:
    try:
        return getattr(probe, name)(*arguments)
    except KeyboardInterrupt as error:  # `tune()` would go on with what it has, but the others wait for this burst
        raise TunerError("a rank was interrupted during a burst") from error


def slowest(outcomes: Sequence[Any]) -> Measurement | Failure:
    """What a trial measured, by rank: a failure anywhere fails it, else the lowest rate counts."""
    for rank, each in enumerate(outcomes):
        if isinstance(each, Failure):
            return replace(each, message=f"rank {rank}: {each.message}")
    lowest: Measurement = min(outcomes, key=lambda each: each.samples_per_s.value)
    return lowest
