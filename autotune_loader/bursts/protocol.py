"""What the tuner asks of a probe, and what parent and child say to each other while one answers.

Both sides send plain records as JSON over a private pair of sockets. Nothing that the child sends is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple, Protocol, TypeVar

from autotune_loader.values import BurstPlan, Failure, FailurePhase, LoaderConfig, Measurement, RateUnit
from autotune_loader.values.serialization import fields_of, from_plain

T = TypeVar("T")


class Probe(Protocol):
    """Runs one configuration for real (or pretends to, in tests). A failing configuration is an answer, not an exception."""

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment with `config` and tell what was measured."""
        ...

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        """Step on one batch that is in memory again and again: the rate that no loader can exceed."""
        ...

    def hand_over(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train on copies of the first batch that workers hand over: what any number of them can feed this step."""
        ...


class Allowance(NamedTuple):
    """What bursts may have of the machine."""

    usable_cores: int = 1
    memory_bytes: int | None = None
    """None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """What a probe knows once it has seen two batches and run the step on the first; times are wall seconds."""

    step: str = ""
    """What is done with a batch, in words; empty before the step has run."""
    samples: int
    batch_bytes: int
    batch_tensors: int
    on_accelerator: bool
    """Whether the dataset itself yields tensors on an accelerator, which workers and pinning cannot handle."""
    first_fetch_s: float
    """Of the second batch: the first may open files, or compile."""
    first_fetch_cpu_s: float
    first_batch_s: float = 0.0
    """Of the very first batch."""
    counts_batches: bool = False
    """Whether a batch counts as one sample, because nothing tells how many it has."""
    least_workers: int = 0
    """1 where the samples cannot be read without a worker."""
    most_workers: int | None = None
    """Workers that can read what a process alone reads: 0 where they would share an open file, say, and 1 where several of an
    IterableDataset would repeat each other."""
    default_threads: int = 1
    """Threads that a step on the CPU has."""
    start_s: float = 0.0
    """What a new process took to import torch and to unpickle the data, as each spawned worker does."""
    device_name: str | None = None
    device_bytes: int | None = None
    """Memory of the accelerator that no other process has."""
    notes: tuple[str, ...] = ()

    @property
    def rate_unit(self) -> RateUnit:
        """Of all rates of its bursts."""
        return "batches/s" if self.counts_batches else "samples/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to run."""

    what: Literal["burst", "step_ceiling", "hand_over"]
    plan: BurstPlan
    config: LoaderConfig = field(default_factory=LoaderConfig)
    usable_cores: int = 1
    reads_pss: bool = True
    """Whether memory is read, which takes some hundredths of a second; once for each configuration is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the child; one of the first four fields is set."""

    phase: FailurePhase | None = None
    ready: WarmupReport | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    ends_run: bool = False
    """Whether no other configuration would be without that failure."""


def send(connection: Connection, record: Request | Message) -> None:
    connection.send_bytes(json.dumps(record, default=fields_of).encode())


def receive(connection: Connection, kind: type[T]) -> T:
    """The next record of the other side.

    Raises:
        EOFError, OSError: it is gone.
    """
    return from_plain(json.loads(connection.recv_bytes()), kind)
