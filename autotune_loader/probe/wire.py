"""What parent and probe process say to each other: plain records as MessagePack over a private socket pair.

    parent   hello ─────────────────────────── burst? ─────────────────────── bye (or just closes)
    child           phase ... phase ... ready         phase ... phase ... answer

Only the workload itself is a pickle, in files that the child inherits (`probe.archive`); nothing the child sends is unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, TypeVar

import msgspec

from autotune_loader.probe.bench import WarmupReport
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the child sets before it imports the user's classes."""

    threads: int
    """The parent's intra-op threads, so that the child trains as the parent would."""
    start_method: str | None = None
    """How the parent starts workers, where it has settled that."""
    torch_state: dict[str, bool | int | str] = field(default_factory=dict)
    """What the parent has set in torch, as `torch_state` reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to run."""

    what: Literal["burst", "step_ceiling"]
    plan: BurstPlan
    config: LoaderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the child; one of the first four fields is set."""

    phase: FailurePhase | None = None
    ready: WarmupReport | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    ends_run: bool = False
    """Whether no other configuration would be without that failure."""


def send(connection: Connection, record: Hello | Request | Message) -> None:
    connection.send_bytes(msgspec.msgpack.encode(record))


def receive(connection: Connection, kind: type[_Record]) -> _Record:
    """The next record of the other side.

    Raises:
        EOFError, OSError: it is gone.
    """
    return msgspec.msgpack.decode(connection.recv_bytes(), type=kind)
