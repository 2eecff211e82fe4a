"""The ranks of one training job, tuned in lock-step: rank 0 searches, every rank bursts, the slowest one counts.

    rank 0    ask ──► own burst ──► answers of all ──► slowest ──► study ──► ask ... ──► result
    rank r    serve: wait for an ask ──► own burst ──► answer ──────────────► wait ... ──► result

All ranks burst at the same time and for the same time, so that they contend for cores, memory and storage as they will in
training. Nobody waits for ever: every wait has a deadline, and a rank that gives up says why to those that wait for it.
Alone (`ranks` is None), every function does the plain thing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autotune_loader.bursts.protocol import Probe
from autotune_loader.decision.space import Limits, Space, least, max_useful_workers
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.machine.ranks import Link, Place, RankLostError, first_line, is_one_of_many, job_link
from autotune_loader.pipeline.workload import Workload
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

JOIN_DEADLINE_S = 300.0
"""Ranks load their datasets at their own pace before they call `tune()`, and again before their first batch."""
GRACE_S = 60.0
"""On top of a burst's own deadline: a probe process that died is started anew, and torch may lie on a network drive."""
FOLLOW_DEADLINE_S = 300.0
"""A rank that follows waits for the slowest rank's burst and for what rank 0 does in between."""
FAREWELL_DEADLINE_S = 10.0
"""Rank 0, whose process may keep the store, waits so long for the others to hear that it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A burst for all ranks to run."""

    config: LoaderConfig
    plan: BurstPlan
    step_alone: bool = False
    """Whether it is the step on one cached batch."""


class Ranks:
    """This process among the ranks of its job.

    Args:
        link: to the others.
        grace_s: how much longer than a burst's own deadline rank 0 waits for an answer.
    """

    def __init__(self, link: Link, *, grace_s: float = GRACE_S) -> None:
        self.link, self.grace_s = link, grace_s
        self.leads = link.rank == 0
        """Whether this is rank 0, which searches, writes and speaks."""
        self.asked = 0
        """How often rank 0 has asked, or was heard to ask."""

    @property
    def on_this_node(self) -> int:
        """How many ranks share this machine; launchers other than torchrun do not always say."""
        nodes = [place.node for place in self.link.places.values()]
        return nodes.count(self.link.places[self.link.rank].node)

    def meet(self, deadline_s: float) -> None:
        """Returns when all ranks are here and know each other's places.

        Raises:
            RankLostError: not every rank came in time.
        """
        self.link.say("here", Place.here())
        until = time.monotonic() + deadline_s
        for rank in range(self.link.ranks):
            try:
                self.link.places[rank] = self.link.wait("here", rank, Place, until - time.monotonic())
            except RankLostError as error:
                raise RankLostError(
                    f"not every rank called tune() within {deadline_s:.0f} s; it must be called on all of them, like a "
                    f"barrier ({error})"
                ) from error

    def ask(self, ask: Ask | None, result: Any = None) -> None:
        """Say to all what they are to run, or the result, as plain values."""
        self.link.say(f"ask{self.asked}", (ask, result))
        self.asked += 1

    def next_ask(self, deadline_s: float) -> tuple[Ask | None, Any]:
        """What rank 0 asks next, or the result."""
        ask, result = self.link.wait(f"ask{self.asked}", 0, tuple[Ask | None, Any], deadline_s)
        self.asked += 1
        return ask, result

    def from_others(self, what: str, kind: Any, deadline_s: float) -> Iterator[tuple[int, Any]]:
        """What every other rank says, to rank 0 alone."""
        until = time.monotonic() + deadline_s
        for rank in range(1, self.link.ranks):
            yield rank, self.link.take(what, rank, kind, until - time.monotonic())


@contextlib.contextmanager
def joined_ranks(*, join_deadline_s: float = JOIN_DEADLINE_S, grace_s: float = GRACE_S) -> Iterator[Ranks | None]:
    """The ranks of this job while the block runs; None where this process trains alone.

    Every rank must come here. An error that leaves the block is told to the others.

    Raises:
        RankLostError: not every rank came in time, or one was lost.
        RuntimeError: a launcher started several ranks, but torch.distributed is not initialised.
    """
    if _alone or not is_distributed():
        yield None
        return
    ranks, why = Ranks(job_link("tune"), grace_s=grace_s), ""
    try:
        ranks.meet(join_deadline_s)
        yield ranks
    except BaseException as error:
        why = first_line(error)
        raise
    finally:
        ranks.link.leave(why)
        if ranks.leads:
            with contextlib.suppress(RankLostError):  # Ctrl-C has ended the others, too
                list(ranks.from_others("left", str, FAREWELL_DEADLINE_S))


def is_distributed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several ranks.

    Raises:
        RuntimeError: a launcher says so, but torch.distributed is not initialised.
    """
    import torch.distributed as dist

    rank, size = rank_of_environment(environ)
    if rank is not None and size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"WORLD_SIZE={size}, but torch.distributed is not initialised, so the ranks cannot agree on a configuration; "
            "call torch.distributed.init_process_group() before tune(), on every rank, or unset RANK to tune alone"
        )
    return is_one_of_many()


_alone: list[bool] = []
"""Not empty while this rank tunes for itself, although there are others."""


@contextlib.contextmanager
def tuning_alone() -> Iterator[None]:
    """Within the block `tune()` runs on this rank only, as where one rank loads for all."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


def environment(ranks: Ranks | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which the machine is inspected: it names the ranks that share this node."""
    if _alone:
        return {name: value for name, value in environ.items() if name != "LOCAL_WORLD_SIZE"}
    if ranks is None:
        return dict(environ)
    return {**environ, "LOCAL_WORLD_SIZE": environ.get("LOCAL_WORLD_SIZE") or str(ranks.on_this_node)}


def workload_of_rank(ranks: Ranks | None, workload: Workload) -> Workload:
    """The workload with this rank's device, and with the model as it is without its distributed wrapper."""
    training = workload.training
    device = training.device if ranks is None else own_device(training.device)
    return replace(workload, training=replace(training, model=unwrapped(training.model), device=device))


def unwrapped(model: Any) -> Any:
    """The user's model inside `DistributedDataParallel`, which cannot travel: its process group lives here only.

    Where the wrapped model was compiled, the model alone is compiled again.
    """
    inner = getattr(model, "_orig_mod", model)
    if type(inner).__name__ != "DistributedDataParallel":
        return model
    if inner is model:
        return model.module
    import torch

    return torch.compile(inner.module)


def own_device(device: str, environ: Mapping[str, str] = os.environ) -> str:
    """The device of this rank where "cuda" was asked for, and it has set none: the one of its local rank."""
    if device != "cuda":
        return device
    import torch

    return f"cuda:{int(environ.get('LOCAL_RANK', 0)) % max(1, torch.cuda.device_count())}"


def common_space(ranks: Ranks | None, usable_cores: int, space: Space) -> Space:
    """The space that is legal on every rank, on rank 0; the others tell theirs and keep it.

    Args:
        ranks: all of them; None leaves the space as it is.
        usable_cores: of this rank. Workers that compute beyond them would only take turns with the other ranks' workers.
        space: of this rank.

    Raises:
        RankLostError: another rank has none, as its workload failed on the first batch, or it was lost.
    """
    if ranks is None:
        return space
    own = within_cores(space, usable_cores)
    if not ranks.leads:
        ranks.link.say("bounds", (own.max_workers, own.limits))
        return own
    for _, (workers, limits) in ranks.from_others("bounds", tuple[int, Limits], JOIN_DEADLINE_S):
        names = [each.name for each in fields(Limits)]
        tightest = Limits(**{name: least(getattr(limits, name), getattr(own.limits, name)) for name in names})
        own = replace(own, max_workers=min(workers, own.max_workers), limits=tightest)
    return own


def within_cores(space: Space, usable_cores: int) -> Space:
    """The space with no more computing workers than cores; where workers wait, it holds far more and stays as it is."""
    if space.max_workers > max_useful_workers(usable_cores, 1.0, 1.0):
        return space
    return replace(space, max_workers=min(space.max_workers, usable_cores))


class LockstepProbe:
    """A `Probe` on rank 0 whose every burst runs on all ranks at once; the slowest rank's measurement is the answer."""

    def __init__(self, ranks: Ranks, own: Probe) -> None:
        self._ranks, self._own = ranks, own

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._everywhere(config, plan)

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        return self._everywhere(LoaderConfig(), plan, step_alone=True)

    def _everywhere(self, config: LoaderConfig, plan: BurstPlan, *, step_alone: bool = False) -> Measurement | Failure:
        # A rank that closes its window early would leave the cores to the others.
        ask = Ask(config=config, plan=replace(plan, min_s=plan.max_s), step_alone=step_alone)
        ranks, until = self._ranks, time.monotonic() + plan.deadline_s + self._ranks.grace_s
        ranks.ask(ask)
        outcomes = {0: _run(self._own, ask, rank=0)}
        answers = ranks.from_others(
            f"answer{ranks.asked}", tuple[Measurement | None, Failure | None], until - time.monotonic()
        )
        return slowest(outcomes | {rank: measured or failure for rank, (measured, failure) in answers})


def slowest(outcomes: Mapping[int, Measurement | Failure]) -> Measurement | Failure:
    """What a trial measured, given every rank's outcome: a failure anywhere fails it, else the lowest rate counts."""
    measured = list[Measurement]()
    for rank, outcome in sorted(outcomes.items()):
        if isinstance(outcome, Failure):
            return replace(outcome, message=f"rank {rank}: {outcome.message}")
        measured.append(outcome)
    return min(measured, key=lambda measurement: measurement.samples_per_s.value)


def serve(ranks: Ranks, probe: Probe, *, deadline_s: float = FOLLOW_DEADLINE_S) -> Any:
    """Burst when rank 0 asks, until it says the result, which is returned as plain values.

    Ctrl-C reaches all ranks at once: the first one is left to rank 0, whose partial result is waited for. A second one ends
    this rank.

    Raises:
        RankLostError: rank 0 is gone, silent for `deadline_s`, or gave up; the message carries its reason.
    """
    ask, is_interrupted = None, False
    while True:
        outcome: Measurement | Failure
        try:
            ask, result = ranks.next_ask(deadline_s)
            if ask is None:
                return result
            outcome = _run(probe, ask, ranks.link.rank)
        except RankLostError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if is_interrupted and isinstance(error, KeyboardInterrupt):
                raise
            is_interrupted = is_interrupted or isinstance(error, KeyboardInterrupt)
            if ask is None:
                continue
            outcome = Failure(kind="crashed", phase="batches", message=f"interrupted: {first_line(error)}")
        is_failed = isinstance(outcome, Failure)
        ranks.link.say(f"answer{ranks.asked}", (None, outcome) if is_failed else (outcome, None))
        ask = None


def _run(probe: Probe, ask: Ask, rank: int) -> Measurement | Failure:
    # Ranks that read the same samples at once would find all but the first read in the page cache.
    plan = replace(ask.plan, seed=ask.plan.seed + rank * 100_003)
    if ask.step_alone:
        return probe.step_ceiling(plan)
    return probe.burst(ask.config, plan)


def share(ranks: Ranks | None, result: TuningResult) -> TuningResult:
    """Give the other ranks the result."""
    if ranks is not None:
        ranks.ask(None, result.to_dict())
    return result


def follow(ranks: Ranks, probe: Probe, parts: dict[str, object]) -> TuningResult:
    """Burst when rank 0 asks; then its result, with this rank's own parts for `make_loader()`."""
    return replace(_result_of(serve(ranks, probe)), parts=dict(parts))


def run_on_rank_0(call: Callable[[], TuningResult], *, deadline_s: float) -> TuningResult:
    """What `call` returns on rank 0, on every rank; `tune()` inside it runs on rank 0 alone.

    Raises:
        RankLostError: rank 0 failed or is gone (on the others).
    """
    with joined_ranks() as ranks:
        if ranks is not None and not ranks.leads:
            return _result_of(ranks.next_ask(deadline_s)[1])
        with tuning_alone() if ranks is not None else contextlib.nullcontext():
            result = call()
        return share(ranks, result)


def _result_of(said: Any) -> TuningResult:
    return TuningResult.from_dict(said)
