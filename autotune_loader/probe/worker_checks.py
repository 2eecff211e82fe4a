"""Short looks at whether several workers may read a dataset at all, before any of their rates is believed.

Each is a canary: what it cannot find out (an error, a hang) counts as no trouble, since a burst with a deadline finds it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.build import build_loader, make_traced_loader, seed_everything
from autotune_loader.pipeline.tracing import TracedDataset, TracedWorkerInit, forget_open_batch
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.burst import OpenLoader
from autotune_loader.probe.samples import SLOW_FETCH_S
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.secrets import without_secrets

log = logging.getLogger(__name__)
T = TypeVar("T")
# The fewest that can differ, and one batch of each is enough.
TWO_WORKERS = LoaderConfig(num_workers=2, prefetch_factor=1)
# A canary that hangs must not end the study, nor take much of its time.
SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR = 5.0, 10.0
# Samples are read for so long, once alone and once by both workers; slow ones are few, or are left alone.
READING_S, MOST_SAMPLES, HANGING_S = 0.08, 64, 2.0
# Samples that differ are read again alone, so often and so long: what is random must not be blamed on the workers.
MOST_REPEATS, REPEATING_S = 8, 0.3
# A sample of more parts than this (one that refers to its whole dataset, say) is not worth a checksum.
MOST_PARTS = 20_000


def workers_repeat_each_other(data: DataSide, first_fetch_s: float) -> bool:
    """Whether two workers begin with the very same batch: an IterableDataset that does not share its samples out.

    Their throughput would be counted twice, and training would see every sample as often as there are workers. Both are
    seeded alike, so that it is no excuse that each shuffles or augments in its own way.
    """
    alike = replace(data, worker_init_fn=_SeededAlike(data.worker_init_fn))
    if first_fetch_s > SLOW_FETCH_S and data.batch_size is not None:
        # A sample of each is enough.
        first_fetch_s, alike = first_fetch_s / data.batch_size, replace(alike, batch_size=1)
    first: dict[int, str] = {}
    try:
        with _loader_for_a_moment() as open_loader:
            loader = make_traced_loader(alike, TWO_WORKERS, seed=0)
            loader.timeout = max(SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR * first_fetch_s)
            open_loader.open(loader)
            del loader
            for batch, fetch in islice(open_loader.iterator, 2 * TWO_WORKERS.num_workers):
                first.setdefault(fetch[0], digest(batch))
    except Exception as error:
        log.info("the canary for repeated samples found nothing out: %s", without_secrets(str(error)))
        return False
    return len(first) == TWO_WORKERS.num_workers and len(set(first.values())) == 1


class _SeededAlike:
    """Runs the user's own `worker_init_fn`, and then gives every worker the same seed."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        if self._inner is not None:
            self._inner(worker)
        seed_everything(0)
        # It refuses to be changed; datasets with a generator of their own seed that from it.
        object.__setattr__(torch.utils.data.get_worker_info(), "seed", 0)


def workers_read_otherwise(data: DataSide, private: DataSide, sample_s: float) -> bool:
    """Whether two forked workers get other samples than a process alone, at the same indices and with the same seeds.

    Most often they share an open file, and each moves the position that the other reads at. Only map-style datasets and
    the start method "fork", by which handles are inherited, are looked at, and only samples that take under 0.1 s.

    Args:
        data: what the workers inherit.
        private: what this process may fetch from.
        sample_s: what one sample takes, in seconds.
    """
    reads = min(MOST_SAMPLES, int(READING_S / max(sample_s, 1e-6)))
    if data.is_iterable or not reads or start_method() != "fork":
        return False
    try:
        keys = _first_keys(private)[:reads]
        begun = time.monotonic()
        alone = _read_alone(private.dataset, keys)
        round_s = time.monotonic() - begun  # the first fetch was cold, and slower
        rounds = max(1, min(MOST_SAMPLES // len(keys), int(READING_S / max(round_s, 1e-6))))
        together = _read_by_two_workers(data, keys, rounds)
        return together != [alone * rounds, _turned(alone) * rounds] and _is_always(alone, private.dataset, keys)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        log.info("the canary for shared handles found nothing out: %s", without_secrets(str(error)))
        return False


def _first_keys(data: DataSide) -> list[Any]:
    """What the very first batch was made of: this process has read those samples and lived."""
    loader = make_traced_loader(data, LoaderConfig(), seed=0)
    sampler: Any = loader.batch_sampler
    return list(next(iter(sampler))) if sampler is not None else [next(iter(loader.sampler))]


def _is_always(expected: list[str], dataset: Any, keys: list[Any]) -> bool:
    until = time.monotonic() + REPEATING_S
    repeats = 0
    while repeats < 2 or (repeats < MOST_REPEATS and time.monotonic() < until):
        if _read_alone(dataset, keys) != expected:
            return False
        repeats += 1
    return True


def _read_alone(dataset: Any, keys: list[Any]) -> list[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: sums of floats depend on it
    try:
        return [_sample_digest(dataset, key, number) for number, key in enumerate(keys)]
    finally:
        torch.set_num_threads(threads)


def _read_by_two_workers(data: DataSide, keys: list[Any], rounds: int) -> list[list[str]]:
    """What each of two workers reads at the same time, all keys again and again.

    The second begins in the middle: two that read the same in step would not disturb each other.
    """
    numbered = [(key, number) for number, key in enumerate(keys)]
    in_turn = [each for both in zip(numbered, _turned(numbered), strict=True) for each in both]
    work = in_turn * rounds
    dataset: Any = _Digested(data.dataset)
    with _loader_for_a_moment() as open_loader:
        open_loader.open(
            build_loader(
                dataset,
                LoaderConfig(num_workers=2, prefetch_factor=len(work)),
                sampler=work,
                batch_size=None,
                collate_fn=_as_it_is,
                worker_init_fn=TracedWorkerInit(data.worker_init_fn),
                generator=torch.Generator(),
                timeout=HANGING_S,
            )
        )
        digests = list(open_loader.iterator)
    return [digests[0::2], digests[1::2]]


def _turned(items: list[T]) -> list[T]:
    return items[len(items) // 2 :] + items[: len(items) // 2]


class _Digested(TracedDataset):
    """The user's dataset, of whose samples only checksums leave the worker."""

    def __getitem__(self, index: Any) -> str:
        key, seed = index
        return _sample_digest(object.__getattribute__(self, "_inner"), key, seed)


def _as_it_is(sample: Any) -> Any:
    return sample


def _sample_digest(dataset: Any, key: Any, seed: int) -> str:
    """The checksum of one sample, with the global generators seeded: the same augmentation in every process."""
    seed_everything(seed)
    return digest(dataset[key])


@contextlib.contextmanager
def _loader_for_a_moment() -> Iterator[OpenLoader]:
    """A place for an iterator whose workers are gone afterwards, however its use ends."""
    open_loader = OpenLoader()
    try:
        yield open_loader
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # its frames hold the iterator, and so the workers
        raise
    finally:
        try:
            open_loader.close()
        except RuntimeError:  # a worker's death, told by torch's signal handler in the midst of it; once
            open_loader.close()
        forget_open_batch()


def digest(batch: Any) -> str:
    """The same for equal batches, whatever process they come from.

    Raises:
        ValueError: it has too many parts.
    """
    checksum = _Checksum()
    checksum.feed(batch)
    return checksum.hexdigest()


class _Checksum:
    """A running checksum of values of any kind."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._parts = 0

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def feed(self, value: Any) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ValueError(f"a batch of more than {MOST_PARTS} parts")
        self._hash.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            self._feed_tensor(value)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self.feed(key)
                self.feed(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                self.feed(part)
        elif isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
            self.feed(value.tolist())
        elif hasattr(value, "tobytes"):
            self._hash.update(value.tobytes())
        elif hasattr(value, "__dict__"):
            self.feed(vars(value))
        elif getattr(type(value), "__repr__", None) != object.__repr__:  # that shows an address
            self._hash.update(repr(value).encode())

    def _feed_tensor(self, value: torch.Tensor) -> None:
        plain = value.detach().contiguous()
        self._hash.update(repr((plain.dtype, plain.shape)).encode())
        self._hash.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
