"""What is asked of the twin, how busy everything is, and how long each stage then takes: one value per configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autotune_loader.twin.queue import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """What is asked: one value per configuration."""

    workers: Ints
    prefetch: Ints
    ahead: Ints
    """Batches that the device prefetch receives ahead of the step."""
    pinned: NDArray[np.bool_]
    threads: tuple[int | None, ...]
    """As `consumer_threads` sets them."""
    step_threads: Floats
    """Those that are at work."""
    step_s: Floats
    """Seconds of the undisturbed step."""
    step_off: Floats
    """Logarithm by which workers slow a step of these threads more than one of others."""
    cores: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """How busy everything is."""

    at_work: Floats
    """Mean number of workers at work."""
    wanting: Floats
    """Those of them that want a CPU."""
    consumer: Floats
    """Share of the time in which the consumer works."""

    def halfway(self, to: Load) -> Load:
        """The load between the two: full steps towards a fixed point oscillate where the cores are just full."""
        return Load(**{each.name: 0.5 * (getattr(self, each.name) + getattr(to, each.name)) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Mean seconds of each stage under a load."""

    service_s: Floats
    receive_s: Floats
    step_s: Floats
    pin_s: Floats
    transit_s: Floats
    """Seconds that a whole batch travels while nobody works on it; delays, but limits nothing."""
    cpu_share: Floats
    """Share of the service time in which the worker wants a CPU."""

    def consumer_s(self, columns: Columns) -> Floats:
        """Seconds between two batches that receipt, step and pinning thread allow."""
        seconds: Floats = np.maximum(loop_s(self.receive_s, self.step_s, columns.ahead), self.pin_s)
        return seconds

    def headroom(self, columns: Columns) -> Floats:
        """How many times what the consumer can take the workers could deliver; 0 without workers."""
        times: Floats = columns.workers * (self.consumer_s(columns) / np.maximum(self.service_s, 1e-12))
        return times

    def bound(self, columns: Columns) -> Floats:
        """Batches per second were every queue endless and every stage steady."""
        slowest = np.maximum(self.consumer_s(columns), self.service_s / np.maximum(columns.workers, 1))
        serial = self.service_s + self.receive_s + self.step_s
        rate: Floats = 1.0 / np.maximum(np.where(columns.workers == 0, serial, slowest), 1e-12)
        return rate


def loop_s(receive_s: Floats | float, step_s: Floats | float, ahead: Ints | int) -> Floats:
    """Seconds of the training loop for each batch: one that a device prefetch receives ahead travels beside the step."""
    seconds: Floats = np.where(np.asarray(ahead) > 0, np.maximum(receive_s, step_s), np.add(receive_s, step_s))
    return seconds


def step_share(wanting: Floats, step_cores: Floats, cores: float) -> Floats:
    """Factor on the step's time because the workers want the same cores."""
    factor: Floats = np.maximum((wanting + step_cores) / cores, 1.0) / np.maximum(step_cores / cores, 1.0)
    return factor


def starved_threads(wanting: Floats, threads: Floats, cores: float) -> Floats:
    """Threads of a parallel step that find no free core, weighted by how much the others wait for them.

    An intra-op region ends when its last thread does, so one thread without a core stalls all; a single thread waits for
    nobody. On 4 cores a 4-thread step took 24 ms alone and 80 ms beside four workers, a 1-thread step 55 and 56 ms.
    """
    starved: Floats = np.clip(wanting + threads - cores, 0.0, threads) * (1.0 - 1.0 / np.maximum(threads, 1.0))
    return starved
