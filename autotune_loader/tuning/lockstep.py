"""What `tune()` does differently where several ranks call it: meet, agree on one space, follow rank 0, share its result.

How ranks talk is in `ranks`; here is what they say about probes, spaces and results. Alone (`ranks` is None), every
function does the plain thing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace

import msgspec

from autotune_loader.decision.space import Limits, Space, least, max_useful_workers
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.opening import OpenProbe
from autotune_loader.probe.protocol import Probe
from autotune_loader.results.loader_file import LoaderFile
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.ranks import (
    LockstepProbe,
    RankLostError,
    Ranks,
    agree,
    is_alone,
    own_device,
    ranks_on_this_node,
    serve,
    unwrapped,
)


def environment(ranks: Ranks | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which the machine is inspected: it names the ranks that share this node."""
    if is_alone():
        return {name: value for name, value in environ.items() if name != "LOCAL_WORLD_SIZE"}
    if ranks is None:
        return dict(environ)
    return {**environ, "LOCAL_WORLD_SIZE": environ.get("LOCAL_WORLD_SIZE") or str(ranks_on_this_node(ranks))}


def workload_of_rank(ranks: Ranks | None, workload: Workload) -> Workload:
    """The workload with this rank's device, and with the model as it is without its distributed wrapper."""
    training = workload.training
    training = replace(training, model=unwrapped(training.model))
    if ranks is not None:
        training = replace(training, device=own_device(training.device))
    return replace(workload, training=training)


@contextlib.contextmanager
def opened_together(
    ranks: Ranks | None, open_probe: Callable[[], AbstractContextManager[OpenProbe]]
) -> Iterator[OpenProbe]:
    """A warm probe on every rank, or an error on every rank.

    Raises:
        WorkloadError: the workload failed on its first batch here.
        RankLostError: it failed on another rank, or a rank was lost.
    """
    with contextlib.ExitStack() as stack:
        if ranks is None:
            yield stack.enter_context(open_probe())
        else:
            yield agree(ranks, lambda: stack.enter_context(open_probe()), lambda opened: b"ready")[0]


def common_space(ranks: Ranks | None, usable_cores: int, make: Callable[[], Space]) -> Space:
    """The space that is legal on every rank; only rank 0 needs it and gets it.

    Args:
        ranks: all of them; None leaves the space as it is made.
        usable_cores: of this rank. Workers that compute beyond them would only take turns with the other ranks' workers.
        make: makes this rank's own space.
    """
    if ranks is None:
        return make()
    own, said = agree(ranks, make, lambda space: msgspec.msgpack.encode(_bounds(within_cores(space, usable_cores))))
    for text in said:
        max_workers, limits = msgspec.msgpack.decode(text, type=tuple[int, Limits])
        tightest = {
            each.name: least(getattr(limits, each.name), getattr(own.limits, each.name)) for each in fields(Limits)
        }
        own = replace(own, max_workers=min(max_workers, own.max_workers), limits=Limits(**tightest))
    return own


def _bounds(space: Space) -> tuple[int, Limits]:
    """What of a space differs from rank to rank."""
    return space.max_workers, space.limits


def within_cores(space: Space, usable_cores: int) -> Space:
    """The space with no more computing workers than cores; where workers wait, it holds far more and stays as it is."""
    if space.max_workers > max_useful_workers(usable_cores, 1.0, 1.0):
        return space
    return replace(space, max_workers=min(space.max_workers, usable_cores))


def lead(ranks: Ranks | None, probe: Probe) -> Probe:
    """The probe that the search runs on: this process' own, or that of all ranks together."""
    return probe if ranks is None else LockstepProbe(ranks, probe)


def share(probe: Probe, result: TuningResult) -> TuningResult:
    """Give the other ranks the result. A partial one is kept even if they are gone: Ctrl-C ended them too."""
    if isinstance(probe, LockstepProbe):
        try:
            probe.finish(to_bytes(result))
        except RankLostError:
            if result.status != "partial":
                raise
    return result


def follow(ranks: Ranks, probe: Probe, parts: dict[str, object]) -> TuningResult:
    """Burst when rank 0 asks; then its result, with this rank's own parts for `make_loader()`."""
    return replace(from_bytes(serve(ranks, probe)), parts=dict(parts))


def to_bytes(result: TuningResult) -> bytes:
    """A result as it travels between ranks: what its file holds."""
    return msgspec.msgpack.encode(result.to_file())


def from_bytes(data: bytes) -> TuningResult:
    """The inverse of `to_bytes`."""
    return TuningResult.from_file(msgspec.msgpack.decode(data, type=LoaderFile))
