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
from typing import Any, Literal

from autotune_loader.decision.space import Limits, Space, least, max_useful_workers
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.machine.ranks import Link, Place, RankLostError, first_line, is_one_of_many, job_link
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.protocol import Probe
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
    """Something for all ranks to run."""

    what: Literal["burst", "step_ceiling"]
    config: LoaderConfig
    plan: BurstPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank has measured; exactly one of the two."""

    measurement: Measurement | None = None
    failure: Failure | None = None


class Ranks:
    """This process among the ranks of its job.

    Args:
        link: to the others.
        grace_s: how much longer than a burst's own deadline rank 0 waits for an answer.
    """

    def __init__(self, link: Link, *, grace_s: float = GRACE_S) -> None:
        self.link, self.grace_s = link, grace_s
        self.rank, self.world_size = link.rank, link.ranks
        self.leads = link.rank == 0
        """Whether this is rank 0, which searches, writes and speaks."""
        self.others = range(1, self.world_size)
        self.asked = 0
        """How often rank 0 has asked, or was heard to ask."""

    @property
    def on_this_node(self) -> int:
        """How many ranks share this machine; launchers other than torchrun do not always say."""
        nodes = [self.link.places[rank].node for rank in range(self.world_size)]
        return nodes.count(nodes[self.rank])

    def meet(self, deadline_s: float) -> None:
        """Returns when all ranks are here and know each other's places.

        Raises:
            RankLostError: not every rank came in time.
        """
        self.link.say("here", Place.here())
        try:
            if self.leads:
                until = time.monotonic() + deadline_s
                for rank in range(self.world_size):
                    self.link.places[rank] = self.link.take("here", rank, Place, until - time.monotonic())
                self.link.say("met", self.link.places)
            self.link.places.update(self.link.wait("met", 0, dict[int, Place], deadline_s))
        except RankLostError as error:
            raise RankLostError(
                f"not every rank called tune() within {deadline_s:.0f} s; it must be called on all of them, like a barrier "
                f"({error})"
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

    def await_leaving(self, deadline_s: float) -> None:
        """Returns when all others have heard how it ended.

        Raises:
            RankLostError: a rank is gone or late.
        """
        until = time.monotonic() + deadline_s
        for rank in self.others:
            self.link.wait("left", rank, str, until - time.monotonic())

    def finish(self, result: Any, *, is_partial: bool = False) -> None:
        """Give all ranks the result, plain values, and let them go.

        Raises:
            RankLostError: a rank did not hear it.
        """
        self.ask(None, result)
        try:
            self.await_leaving(FAREWELL_DEADLINE_S if is_partial else self.grace_s)
        except RankLostError:
            if not is_partial:  # Ctrl-C has ended the others, too
                raise
        for number in range(self.asked):
            self.link.store.delete_key(f"ask{number}/0")


@contextlib.contextmanager
def joined_ranks(*, join_deadline_s: float = JOIN_DEADLINE_S, grace_s: float = GRACE_S) -> Iterator[Ranks | None]:
    """The ranks of this job while the block runs; None where this process trains alone.

    Every rank must come here. An error that leaves the block is told to the others.

    Raises:
        RankLostError: not every rank came in time, or one was lost.
        RuntimeError: a launcher started several ranks, but torch.distributed is not initialised.
    """
    if is_alone() or not is_distributed():
        yield None
        return
    ranks = Ranks(job_link("tune"), grace_s=grace_s)
    try:
        ranks.meet(join_deadline_s)
        yield ranks
        ranks.link.leave()
    except BaseException as error:
        ranks.link.leave(first_line(error))
        if ranks.leads:
            with contextlib.suppress(RankLostError):
                ranks.await_leaving(FAREWELL_DEADLINE_S)
        raise


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


def is_alone() -> bool:
    """Whether this rank tunes for itself now, although there are others."""
    return bool(_alone)


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
    if is_alone():
        return {name: value for name, value in environ.items() if name != "LOCAL_WORLD_SIZE"}
    if ranks is None:
        return dict(environ)
    return {**environ, "LOCAL_WORLD_SIZE": environ.get("LOCAL_WORLD_SIZE") or str(ranks.on_this_node)}


def workload_of_rank(ranks: Ranks | None, workload: Workload) -> Workload:
    """The workload with this rank's device, and with the model as it is without its distributed wrapper."""
    training = workload.training
    training = replace(training, model=unwrapped(training.model))
    if ranks is not None:
        training = replace(training, device=own_device(training.device))
    return replace(workload, training=training)


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
    """The device of this rank where "cuda" was asked for: the one it has chosen, else the one of its local rank."""
    if device != "cuda":
        return device
    import torch

    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    local = int(environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())
    return f"cuda:{chosen or local}"


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
    until = time.monotonic() + JOIN_DEADLINE_S
    for rank in ranks.others:
        workers, limits = ranks.link.take("bounds", rank, tuple[int, Limits], until - time.monotonic())
        tightest = {
            each.name: least(getattr(limits, each.name), getattr(own.limits, each.name)) for each in fields(Limits)
        }
        own = replace(own, max_workers=min(workers, own.max_workers), limits=Limits(**tightest))
    return own


def within_cores(space: Space, usable_cores: int) -> Space:
    """The space with no more computing workers than cores; where workers wait, it holds far more and stays as it is."""
    if space.max_workers > max_useful_workers(usable_cores, 1.0, 1.0):
        return space
    return replace(space, max_workers=min(space.max_workers, usable_cores))


def lead(ranks: Ranks | None, probe: Probe) -> Probe:
    """The probe that the search runs on: this process' own, or that of all ranks together."""
    return probe if ranks is None else LockstepProbe(ranks, probe)


class LockstepProbe:
    """A `Probe` on rank 0 whose every burst runs on all ranks at once; the slowest rank's measurement is the answer."""

    def __init__(self, ranks: Ranks, own: Probe) -> None:
        self._ranks, self._own = ranks, own

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._everywhere(Ask(what="burst", config=config, plan=plan))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        return self._everywhere(
            Ask(what="step_ceiling", config=LoaderConfig(consumer_threads=consumer_threads), plan=plan)
        )

    def _everywhere(self, ask: Ask) -> Measurement | Failure:
        # A rank that closes its window early would leave the cores to the others.
        ask = replace(ask, plan=replace(ask.plan, min_s=ask.plan.max_s))
        ranks, until = self._ranks, time.monotonic() + ask.plan.deadline_s + self._ranks.grace_s
        ranks.ask(ask)
        outcomes = {0: _run(self._own, ask, rank=0)}
        for rank in ranks.others:
            answer = ranks.link.take(f"answer{ranks.asked}", rank, Answer, until - time.monotonic())
            outcomes[rank] = answer.measurement or answer.failure
        return slowest(outcomes)


def slowest(outcomes: Mapping[int, Measurement | Failure]) -> Measurement | Failure:
    """What a trial measured, given every rank's outcome: a failure anywhere fails it, else the lowest rate counts."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    if failed:
        rank, failure = min(failed.items())
        return replace(failure, message=f"rank {rank}: {failure.message}")
    measured = [outcome for outcome in outcomes.values() if isinstance(outcome, Measurement)]
    least = min(measured, key=lambda measurement: measurement.samples_per_s.value)
    return replace(least, bad_samples=tuple(dict.fromkeys(bad for each in measured for bad in each.bad_samples)))


def serve(ranks: Ranks, probe: Probe, *, deadline_s: float = FOLLOW_DEADLINE_S) -> Any:
    """Burst when rank 0 asks, until it says the result, which is returned as plain values.

    Ctrl-C reaches all ranks at once: the first one is left to rank 0, whose partial result is waited for. A second one ends
    this rank.

    Raises:
        RankLostError: rank 0 is gone, silent for `deadline_s`, or gave up; the message carries its reason.
    """
    is_interrupted = False
    while True:
        try:
            ask, result = ranks.next_ask(deadline_s)
            if ask is None:
                return result
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            continue
        try:
            outcome = _run(probe, ask, ranks.rank)
        except (Exception, KeyboardInterrupt) as error:
            if is_interrupted and isinstance(error, KeyboardInterrupt):
                raise
            is_interrupted = isinstance(error, KeyboardInterrupt)
            outcome = Failure(kind="crashed", phase="batches", message=f"interrupted: {first_line(error)}")
        answer = Answer(failure=outcome) if isinstance(outcome, Failure) else Answer(measurement=outcome)
        ranks.link.say(f"answer{ranks.asked}", answer)


def _run(probe: Probe, ask: Ask, rank: int) -> Measurement | Failure:
    # Ranks that read the same samples at once would find all but the first read in the page cache.
    plan = replace(ask.plan, seed=ask.plan.seed + rank * 100_003)
    if ask.what == "step_ceiling":
        return probe.step_ceiling(ask.config.consumer_threads, plan)
    return probe.burst(ask.config, plan)


def share(ranks: Ranks | None, result: TuningResult) -> TuningResult:
    """Give the other ranks the result. A partial one is kept even if they are gone: Ctrl-C ended them too."""
    if ranks is not None:
        ranks.finish(result.to_dict(), is_partial=result.status == "partial")
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
        if ranks is None:
            return call()
        if not ranks.leads:
            return _result_of(ranks.next_ask(deadline_s)[1])
        with tuning_alone():
            result = call()
        return share(ranks, result)


def _result_of(said: Any) -> TuningResult:
    return TuningResult.from_dict(said)
