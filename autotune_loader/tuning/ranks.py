"""The ranks of one training job, tuned in lock-step: rank 0 searches, every rank bursts, the slowest one counts.

    rank 0    ask ──► own burst ──► gather ──► min ──► study ──► ask ... ──► finish(result)
    rank r    serve: receive ──► own burst ──► answer ──────────► receive ... ──► result

All ranks burst at the same time and for the same time, so that they contend for cores, memory and storage as they will in
training. What they say to each other goes through a gloo group of its own, so training may use NCCL. Nobody waits for ever:
every wait has a deadline, and when one rank is lost the others are told before they give up themselves.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import msgspec

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.probe.protocol import Probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

# Ranks load their datasets at their own pace before they call tune(); gloo's group is made when the last has come.
JOIN_DEADLINE_S = 300.0
# On top of a burst's own deadline: a probe process that died is started anew, and torch may lie on a network drive.
GRACE_S = 60.0
# A rank that follows waits for the slowest rank's burst and for what rank 0 does in between.
FOLLOW_DEADLINE_S = 300.0
# Telling the others that it is over must not itself become a wait.
FAREWELL_DEADLINE_S = 10.0
_T = TypeVar("_T")


class RankLostError(TunerError):
    """A rank of the job died, did not answer in time, or failed in a way that ends the tuning on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What rank 0 sends: something to run, or the end. Exactly one of `plan`, `result` and `error` is there."""

    what: Literal["burst", "step_ceiling"] = "burst"
    config: LoaderConfig | None = None
    plan: BurstPlan | None = None
    result: bytes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank sends back; exactly one of the two."""

    measurement: Measurement | None = None
    failure: Failure | None = None

    @property
    def outcome(self) -> Measurement | Failure:
        empty = Failure(kind="crashed", phase="batches", message="an empty answer")
        return self.measurement or self.failure or empty


class Ranks:
    """This process among the ranks of its job, and messages between them, each with a deadline.

    Args:
        rank: of this process.
        world_size: processes of the job.
        group: a gloo process group over all of them.
        grace_s: how much longer than a burst's own deadline rank 0 waits for an answer.
    """

    def __init__(self, rank: int, world_size: int, group: Any, *, grace_s: float = GRACE_S) -> None:
        self.rank = rank
        self.world_size = world_size
        self.grace_s = grace_s
        self._group = group
        self.is_over = False
        """Whether the others have been told how it ended; they receive no more."""
        self._owed: dict[int, _Call[bytes]] = {}
        self._lost: set[int] = set()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which searches, writes and speaks."""
        return self.rank == 0

    @property
    def others(self) -> range:
        return range(1, self.world_size)

    def send(self, peer: int, payload: bytes, deadline_s: float) -> None:
        """Send bytes to a rank.

        Raises:
            RankLostError: it is gone, or did not take them in time.
        """
        self._finished(self._sending(peer, payload), peer, deadline_s)

    def receive(self, peer: int, deadline_s: float) -> bytes:
        """The next bytes from a rank; an interrupted wait is taken up again by the next call.

        Raises:
            RankLostError: it is gone, or sent nothing in time.
        """
        self.expect(peer)
        payload = self._finished(self._owed[peer], peer, deadline_s)
        del self._owed[peer]
        return payload

    def expect(self, peer: int) -> None:
        """Begin to receive from a rank; `receive` returns what came."""
        if peer not in self._owed:
            self._owed[peer] = _Call(lambda: _receive(peer, self._group))

    def exchange(self, payload: bytes, deadline_s: float) -> list[bytes]:
        """Every rank's payload in the order of ranks, on rank 0; the others send theirs and get nothing.

        Raises:
            RankLostError: a rank is gone or late.
        """
        if not self.leads:
            self.send(0, payload, deadline_s)
            return []
        until = time.monotonic() + deadline_s
        return [payload, *(self.receive(peer, until - time.monotonic()) for peer in self.others)]

    def tell(self, payload: bytes, deadline_s: float) -> None:
        """Send bytes from rank 0 to all others that are not known to be lost.

        Raises:
            RankLostError: a rank is gone or did not take them; the others have got them all the same.
        """
        calls = {peer: self._sending(peer, payload) for peer in self.others if peer not in self._lost}
        until, lost = time.monotonic() + deadline_s, None
        for peer, call in calls.items():
            try:
                self._finished(call, peer, until - time.monotonic())
            except RankLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def collect_owed(self) -> None:
        """Take in what an interrupted wait left on its way: a rank that sends cannot receive before that."""
        for peer in list(self._owed):
            self.receive(peer, FAREWELL_DEADLINE_S)

    def _sending(self, peer: int, payload: bytes) -> _Call[None]:
        return _Call(lambda: _send(payload, peer, self._group))

    def _finished(self, call: _Call[_T], peer: int, deadline_s: float) -> _T:
        if not call.wait(deadline_s):
            self._lost.add(peer)
            raise RankLostError(
                f"rank {peer} did not answer within {max(deadline_s, 0.0):.0f} s (seen from rank {self.rank}); "
                "look at its log and stack (py-spy dump), then tune again"
            )
        if call.error is not None:
            self._lost.add(peer)
            raise RankLostError(
                f"rank {peer} is gone (seen from rank {self.rank}): {_first_line(call.error)}; look at its log for the reason"
            ) from call.error
        return call.value


@contextlib.contextmanager
def joined_ranks(*, join_deadline_s: float = JOIN_DEADLINE_S, grace_s: float = GRACE_S) -> Iterator[Ranks | None]:
    """The ranks of this job, in a group of their own while the block runs; None where this process trains alone.

    Every rank must come here. An error that leaves the block on rank 0 is told to the others.

    Raises:
        RankLostError: not every rank came in time, or one was lost.
        RuntimeError: a launcher started several ranks, but torch.distributed is not initialised.
    """
    if is_alone() or not is_distributed():
        yield None
        return
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size(), _make_group(join_deadline_s), grace_s=grace_s)
    try:
        yield ranks
    except BaseException as error:
        if ranks.leads and not ranks.is_over:
            with contextlib.suppress(RankLostError):
                ranks.tell(_encode(Ask(error=f"rank 0 gave up: {_first_line(error)}")), FAREWELL_DEADLINE_S)
        raise
    else:
        # Only a group in which nobody waits can be taken down; a broken one goes with the process.
        dist.destroy_process_group(ranks._group)


def is_distributed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several ranks.

    Raises:
        RuntimeError: a launcher says so, but torch.distributed is not initialised.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_world_size() > 1)
    rank, size = rank_of_environment(environ)
    if rank is not None and size > 1:
        raise RuntimeError(
            f"WORLD_SIZE={size}, but torch.distributed is not initialised, so the ranks cannot agree on a configuration; "
            "call torch.distributed.init_process_group() before tune(), on every rank, or unset RANK to tune alone"
        )
    return False


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


class LockstepProbe:
    """A `Probe` on rank 0 whose every burst runs on all ranks at once; the slowest rank's measurement is the answer."""

    def __init__(self, ranks: Ranks, own: Probe) -> None:
        self._ranks = ranks
        self._own = own

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._everywhere("burst", config, plan)

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        return self._everywhere("step_ceiling", LoaderConfig(consumer_threads=consumer_threads), plan)

    def finish(self, result: bytes) -> None:
        """Give all ranks the result and let them go."""
        self._ranks.collect_owed()
        self._ranks.tell(_encode(Ask(result=result)), self._ranks.grace_s)
        self._ranks.is_over = True

    def _everywhere(
        self, what: Literal["burst", "step_ceiling"], config: LoaderConfig, plan: BurstPlan
    ) -> Measurement | Failure:
        # A rank that closes its window early would leave the cores to the others.
        ask = Ask(what=what, config=config, plan=replace(plan, min_s=plan.max_s))
        until = time.monotonic() + plan.deadline_s + self._ranks.grace_s
        for peer in self._ranks.others:
            self._ranks.expect(peer)
        self._ranks.tell(_encode(ask), self._ranks.grace_s)
        answers = {0: _run(self._own, ask, rank=0)}
        for peer in self._ranks.others:
            answers[peer] = _decode(self._ranks.receive(peer, until - time.monotonic()), Answer)
        return slowest({rank: answer.outcome for rank, answer in answers.items()})


def slowest(outcomes: Mapping[int, Measurement | Failure]) -> Measurement | Failure:
    """What a trial measured, given every rank's outcome: a failure anywhere fails it, else the lowest rate counts."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    if failed:
        rank, failure = min(failed.items())
        return replace(failure, message=f"rank {rank}: {failure.message}")
    measured = [outcome for outcome in outcomes.values() if isinstance(outcome, Measurement)]
    least = min(measured, key=lambda measurement: measurement.samples_per_s.value)
    return replace(least, bad_samples=tuple(dict.fromkeys(bad for each in measured for bad in each.bad_samples)))


def serve(ranks: Ranks, probe: Probe, *, deadline_s: float = FOLLOW_DEADLINE_S) -> bytes:
    """Burst when rank 0 asks, until it sends the result, which is returned.

    Ctrl-C reaches all ranks at once; a following rank answers what it owes and still waits for rank 0's partial result.

    Raises:
        RankLostError: rank 0 is gone, silent for `deadline_s`, or gave up; the message carries its reason.
    """
    while True:
        ask = _decode(ranks.receive(0, deadline_s), Ask)
        if ask.error is not None:
            raise RankLostError(ask.error)
        if ask.result is not None:
            return ask.result
        try:
            answer = _run(probe, ask, ranks.rank)
        except (Exception, KeyboardInterrupt) as error:
            answer = Answer(
                failure=Failure(kind="crashed", phase="batches", message=f"interrupted: {_first_line(error)}")
            )
        ranks.send(0, _encode(answer), deadline_s)


def agree(ranks: Ranks, mine: Callable[[], _T], encode: Callable[[_T], bytes]) -> tuple[_T, list[bytes]]:
    """Do something on every rank that may fail on some, and let all ranks fail together.

    Args:
        ranks: all of them.
        mine: what to do here.
        encode: its value as bytes, for rank 0 to see.

    Returns:
        This rank's value and, on rank 0, every rank's as bytes.

    Raises:
        RankLostError: it failed on another rank; the message names the first one.
        BaseException: it failed here: what `mine` raised.
    """
    value, error = None, None
    try:
        value = mine()
    except Exception as raised:
        error = raised
    own = b"-" + _first_line(error).encode() if error is not None else b"+" + encode(value)  # type: ignore[arg-type]
    said = ranks.exchange(own, JOIN_DEADLINE_S)
    failed = next(
        (f"rank {rank} failed: {text[1:].decode()}" for rank, text in enumerate(said) if text[:1] == b"-"), ""
    )
    if ranks.leads:
        ranks.tell(failed.encode(), ranks.grace_s)
    else:
        failed = ranks.receive(0, JOIN_DEADLINE_S).decode()
    ranks.is_over = bool(failed)
    if error is not None:
        raise error
    if failed:
        raise RankLostError(failed)
    return value, [text[1:] for text in said]  # type: ignore[return-value]


def run_on_rank_0(call: Callable[[], bytes], *, deadline_s: float) -> bytes:
    """What `call` returns on rank 0, on every rank; `tune()` inside it runs on rank 0 alone.

    Raises:
        RankLostError: rank 0 failed or is gone (on the others).
    """
    with joined_ranks() as ranks:
        if ranks is None:
            return call()
        if not ranks.leads:
            ask = _decode(ranks.receive(0, deadline_s), Ask)
            if ask.result is None:
                raise RankLostError(ask.error or "rank 0 sent nothing")
            return ask.result
        with tuning_alone():
            result = call()
        ranks.tell(_encode(Ask(result=result)), ranks.grace_s)
        return result


def ranks_on_this_node(ranks: Ranks) -> int:
    """How many ranks share this machine, by its name; launchers other than torchrun do not always say.

    Raises:
        RankLostError: a rank is gone or late.
    """
    here = platform.node().encode()
    nodes = ranks.exchange(here, JOIN_DEADLINE_S)
    if not ranks.leads:
        return int(ranks.receive(0, JOIN_DEADLINE_S))
    for peer in ranks.others:
        ranks.send(peer, str(nodes.count(nodes[peer])).encode(), ranks.grace_s)
    return nodes.count(here)


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


class _Call(Generic[_T]):
    """A blocking call in a thread of its own, so that Ctrl-C and our deadline get through."""

    value: _T

    def __init__(self, call: Callable[[], _T]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="autotune-rank", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error


def _make_group(deadline_s: float) -> Any:
    import torch.distributed as dist

    # gloo's own time-out must outlast every wait of ours; it only bounds threads that we have given up on.
    longest_s = max(deadline_s, FOLLOW_DEADLINE_S + GRACE_S)
    call = _Call(lambda: dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=longest_s)))
    if not call.wait(deadline_s):
        raise RankLostError(
            f"not every rank called tune() within {deadline_s:.0f} s; it must be called on all of them, like a barrier"
        )
    if call.error is not None:
        raise RankLostError(f"the ranks could not meet in tune(): {_first_line(call.error)}") from call.error
    return call.value


def _send(payload: bytes, peer: int, group: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor([len(payload)], dtype=torch.int64), dst=peer, group=group)
    if payload:
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), dst=peer, group=group)


def _receive(peer: int, group: Any) -> bytes:
    import torch
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=peer, group=group)
    payload = torch.zeros(int(size.item()), dtype=torch.uint8)
    if len(payload):
        dist.recv(payload, src=peer, group=group)
    return payload.numpy().tobytes()


def _run(probe: Probe, ask: Ask, rank: int) -> Answer:
    assert ask.plan is not None
    assert ask.config is not None
    # Ranks that read the same samples at once would find all but the first read in the page cache.
    plan = replace(ask.plan, seed=ask.plan.seed + rank * 100_003)
    if ask.what == "step_ceiling":
        outcome = probe.step_ceiling(ask.config.consumer_threads, plan)
    else:
        outcome = probe.burst(ask.config, plan)
    return Answer(failure=outcome) if isinstance(outcome, Failure) else Answer(measurement=outcome)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _encode(record: Ask | Answer) -> bytes:
    return msgspec.msgpack.encode(record)


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(data, type=kind)
