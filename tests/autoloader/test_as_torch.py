"""Whatever a script does with a loader, it sees what `DataLoader` shows it.

Each scenario runs with a plain one, with an AutoLoader, and with plain ones under `enable("watch")`
and `enable("run")`, which tunes those that ask for no workers, too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import multiprocessing
import pickle
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader import AutoLoader, enable
from tests.support.data import Rows
from tests.support.schedules import Numbers, Stream

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


class Timed(Dataset[Any]):
    """Slow enough that whatever is tuned is tuned here, too."""

    scale = 1

    def __init__(self, samples: int = 64, seconds: float = 0.002) -> None:
        self.seconds, self.labels = seconds, np.zeros(samples, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.tensor([index, int(self.labels[index])]) * self.scale


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def changes_between_epochs(base: Any, workers: int) -> Any:
    """Workers that are kept see the first epoch."""
    seen = []
    for are_kept in (False, workers > 0):
        data = Timed()
        loader = base(data, batch_size=8, num_workers=workers, persistent_workers=are_kept)
        for epoch in range(3 if are_kept else 4):
            data.labels[:], data.scale = epoch, 1 + epoch // 2
            seen.append(rows(loader))
    return seen


def inside_its_own_loop(base: Any, workers: int) -> Any:
    loader, seen = base(Timed(), batch_size=16, num_workers=workers), []
    for batch in loader:
        seen += [batch.tolist(), *rows(itertools.islice(loader, 2))]
    return seen


def in_a_thread(base: Any, workers: int) -> Any:
    loader, seen = base(Timed(), batch_size=8, num_workers=workers), []
    made_here = iter(loader)

    def read() -> None:
        seen.extend(rows(made_here) + rows(itertools.islice(loader, 3)) + rows(loader))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(60)
    return seen, thread.is_alive()


def in_threads_at_once(base: Any, workers: int) -> Any:
    def read(seed: int) -> Any:
        order = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
        return rows(base(Timed(), batch_size=4, num_workers=workers, **order))

    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(read, range(3)))
    return seen, torch.get_rng_state().tolist(), len(warnings.filters)


class Forever:
    def __init__(self, inner: Any) -> None:
        self.sampler = inner

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(itertools.repeat(self.sampler))


def infinite(base: Any, workers: int) -> Any:
    """As ultralytics': one iterator for all epochs, until `reset`."""

    class Endless(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
            self.reset()

        def __iter__(self) -> Iterator[Any]:
            return itertools.islice(self.iterator, 8)

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    data = Timed()
    loader = Endless(data, batch_size=8, num_workers=workers)
    seen = [*rows(loader), *rows(loader)]
    data.labels[:] = 7
    loader.reset()
    return seen + rows(loader)


class NotDecodedError(Exception):
    def __init__(self, path: str, code: int) -> None:
        super().__init__(f"{path}: {code}")


def not_decoded() -> NotDecodedError:
    return NotDecodedError("sample", 7)


def events(iterator: Any) -> list[Any]:
    """All batches and exceptions until the end."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(iterator).tolist())
        except StopIteration:
            return seen
        except Exception as error:
            words = ("DataLoader worker process", "sample")
            seen.append((type(error).__name__, *(each in str(error) for each in words)))


def raises_at_13(make: Callable[[], BaseException], index: int) -> Any:
    if index == 13:
        raise make()
    return torch.tensor([index])


def failing(make: Callable[[], BaseException]) -> Callable[[Any, int], Any]:
    data = Rows(functools.partial(raises_at_13, make), 40)

    def scenario(base: Any, workers: int) -> Any:
        loader, seen = base(data, batch_size=4, num_workers=workers), []
        for _ in range(2):
            iterator = iter(loader)
            # A StopIteration of the dataset's own is no end.
            seen += [events(iterator), events(iterator)]
        return seen

    return scenario


def fail(worker: int) -> None:
    raise KeyError(f"sample of {worker}")


def init_fails(base: Any, workers: int) -> Any:
    loader = base(Timed(8), batch_size=4, num_workers=workers, worker_init_fn=fail)
    return events(iter(loader))[:1]


OF_LOADER = (
    "batch_size num_workers prefetch_factor pin_memory drop_last timeout dataset in_order "
    "persistent_workers multiprocessing_context _index_sampler _auto_collation _dataset_kind "
    "collate_fn generator"
)
OF_ITERATOR = "_num_yielded _num_workers _dataset _index_sampler _persistent_workers"


def attributes(base: Any, workers: int) -> Any:
    asked = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = base(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True, **asked)
    iterator = iter(loader)
    next(iterator), next(iterator)
    seen = [getattr(loader, name) for name in OF_LOADER.split()]
    seen += [getattr(iterator, name) for name in OF_ITERATOR.split()]
    seen += [isinstance(iterator, _BaseDataLoaderIter), loader._iterator is iterator, len(iterator)]
    with pytest.raises(TypeError) as raised:
        len(base(Stream(9), num_workers=workers))
    seen.append(raised.value)
    if workers:
        seen.append(len(iterator._workers))
        iterator._shutdown_workers()
        seen.append(len(multiprocessing.active_children()))
    return [repr(each).split(" at 0x")[0] for each in seen]


def copies(base: Any, workers: int) -> Any:
    loader = base(Numbers(12), batch_size=4, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    others = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    return [rows(each) for each in (*others, iterator)]


Pair = namedtuple("Pair", ["x", "y"])


class Everything(Timed):
    """Writes to shared memory, asks and changes what its worker is, and notes for its collate."""

    __slots__ = ("longest",)

    def __init__(self) -> None:
        super().__init__(24)
        self.counts, self.longest, self.epoch = torch.zeros(24).share_memory_(), 0, 0

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        self.longest = max(self.longest, index % 7)
        about_worker, info = [0, 0, 0], get_worker_info()
        if info is not None:
            info.dataset.epoch += 1
            about_worker = [info.num_workers, info.id, int(info.dataset is self)]
        return torch.tensor([index, self.epoch, *about_worker])

    def collate(self, samples: list[Any]) -> Pair:
        longest, self.longest = self.longest, 0
        return Pair(SimpleNamespace(x=torch.stack(samples)), longest)


def workers_get_what_is_sent(base: Any, workers: int) -> Any:
    data = Everything()
    loader = base(data, batch_size=4, num_workers=workers, collate_fn=data.collate)
    batches = [(type(batch), type(batch.x), batch.x.x.tolist(), batch.y) for batch in loader]
    return batches, data.counts.tolist()


def daemonic(base: Any, workers: int) -> Any:
    """A process that may have no children."""
    ours, theirs = multiprocessing.Pipe()

    def read() -> None:
        try:
            theirs.send(rows(base(Numbers(8), batch_size=4, num_workers=workers)))
        except Exception as error:
            theirs.send(type(error).__name__)

    child = multiprocessing.get_context("fork").Process(target=read, daemon=True)
    child.start()
    told = ours.recv() if ours.poll(60) else None
    child.join(10)
    return told


def stacked_and_one_more(samples: Any) -> Any:
    return torch.stack(samples) + 1


def attributes_set_later(base: Any, workers: int) -> Any:
    data = Everything()
    data.seconds = 0.03  # long enough that a report tells of both
    loader = base(data, batch_size=4, num_workers=workers)
    seen = rows(loader)
    loader.num_workers, loader.prefetch_factor = (0, None) if workers else (2, 2)
    seen += rows(loader)
    loader.collate_fn = stacked_and_one_more
    loader._DataLoader__initialized = False
    loader.dataset = Everything()
    loader.batch_sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
    loader._DataLoader__initialized = True
    return seen + rows(loader)


def timeout(base: Any, workers: int) -> Any:
    loader = base(Timed(8, 0.2), batch_size=8, num_workers=workers, timeout=0.5)
    try:
        next(iter(loader))
    except Exception as error:
        return type(error), str(error)


FAILING = [failing(make) for make in (not_decoded, StopIteration)]
SCENARIOS = [
    changes_between_epochs, inside_its_own_loop, in_a_thread, infinite, *FAILING, attributes,
    copies, workers_get_what_is_sent, daemonic, attributes_set_later, timeout,
]  # fmt: skip


@functools.cache
def plain(scenario: Callable[..., Any], workers: int) -> Any:
    torch.manual_seed(0)
    return scenario(DataLoader, workers)


def enabled(verb: Any, scenario: Callable[..., Any], workers: int) -> Any:
    with enable(verb, allow_workers=verb == "run"):
        return scenario(DataLoader, workers)


CASES = pytest.mark.parametrize(
    ("scenario", "workers"),
    [*itertools.product(SCENARIOS, (0, 2)), (in_threads_at_once, 0), (init_fails, 2)],
    ids=lambda each: getattr(each, "__qualname__", str(each)).split(".")[0],
)


@pytest.mark.parametrize(
    "how", ["AutoLoader", pytest.param("watch", marks=pytest.mark.system)]
)  # "run" is in test_at_length.py
@CASES
def test_a_scenario_goes_as_with_dataloader(
    scenario: Callable[..., Any], workers: int, how: str
) -> None:
    expected = plain(scenario, workers)
    torch.manual_seed(0)
    is_ours = how == "AutoLoader"
    seen = scenario(AutoLoader, workers) if is_ours else enabled(how, scenario, workers)
    assert seen == expected
