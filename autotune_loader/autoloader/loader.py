"""`AutoLoader`, as training loops and frameworks see it: a DataLoader that tunes itself while it trains."""

from __future__ import annotations

import inspect
import os
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing import current_process
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.autoloader.asked import asked_for
from autotune_loader.autoloader.epoch import EpochIterator, Shared
from autotune_loader.autoloader.found import Found
from autotune_loader.autoloader.log import Log
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.parts import Parts
from autotune_loader.autoloader.seeds import Seeds, draws_nothing, mixed
from autotune_loader.autoloader.tuner import MOST_WORKERS, Tried, Tuner
from autotune_loader.autoloader.work import Sent
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.lines import users_line
from autotune_loader.machine.host import require_linux
from autotune_loader.machine.limits import memory_budget, usable_cores
from autotune_loader.pipeline.site import NOWHERE, Site
from autotune_loader.pipeline.workload import is_users, length_of
from autotune_loader.results.file import load_config
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig, require_bool

require_linux("AutoLoader")

T = TypeVar("T")
WORKER_BYTES = 1 << 27
"""Memory of its own that a worker is counted with, and its batches."""


_tried: dict[Site, tuple[weakref.ref[Sent], Tried]] = {}
"""By the latest loader of a site. The next one goes on from there, once that is gone: two that live never share it."""
MOST_SITES = 256


class AutoLoader(DataLoader[T], Generic[T]):
    """A DataLoader that tunes its workers and prefetching while it trains.

    It gives the batches that `DataLoader` with the same arguments gives: the same indices in the same order, each once. It may
    use worker processes: as with `num_workers >= 1` in torch, these see the dataset as it was when they began. Before a
    worker's batches are used, its first ones are compared with the loop's own. `num_workers=0`, written out, means none.

    Where the loop waits for data, other numbers of workers are tried for parts of a second. What is not shown to be faster
    than what was asked for is not kept. Random numbers of a batch come from (seed of the epoch, number of the batch), so
    that augmentations do not depend on the number of workers. Workers that are lost are replaced and their batches fetched
    again. An IterableDataset, whose samples depend on its workers, is read by torch's own iterator.

    Args:
        dataset: as for DataLoader, or a DataLoader, which is only read.
        *args: as for DataLoader.
        config: a configuration or a `loader.json` in place of `num_workers`, `prefetch_factor`, `pin_memory`, `in_order`,
            `persistent_workers` and start method.
        tune: False changes nothing: with `num_workers=4` it is a DataLoader that hands batches over faster and outlives lost
            workers.
        on_change: called with `loader.found` each time the loader has settled on a configuration, such as for a logger.
        max_workers: most worker processes at any time.
        workers: whether workers may be used. None: unless `num_workers=0` is written out.
        **arguments: as for DataLoader. `prefetch_factor`, `persistent_workers`, `timeout` and `multiprocessing_context` may be
            given without `num_workers`: they say how workers are, if there are any.

    Raises:
        TypeError: an argument that DataLoader does not have.
        ValueError: as DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        config: LoaderConfig | str | os.PathLike[str] | None = None,
        tune: bool = True,
        on_change: Callable[[Found], None] | None = None,
        max_workers: int | None = None,
        workers: bool | None = None,
        **arguments: Any,
    ) -> None:
        require_bool("tune", tune)
        if config is not None and not isinstance(config, LoaderConfig):
            config = load_config(config)
        names = inspect.signature(AutoLoader).parameters
        asked = asked_for(dataset, args, arguments, config, workers=workers, own=names)
        super().__init__(**asked.arguments)
        # Public attributes are arguments: who makes a loader anew from another's (Lightning, Accelerate) gets the same one.
        self.tune, self.on_change, self.max_workers, self.workers = tune, on_change, max_workers, asked.may_use_workers
        self._how = asked.how
        self._seed: int | None = None
        self._epochs = 0
        self._order: Order | None = None
        self._line = users_line(sys._getframe(1), libraries=True)
        self._shared = self._fresh()

    @property
    def found(self) -> Found:
        """What is known of the loader, which lives on without it and its data."""
        return self._shared.found

    @property
    def config(self) -> LoaderConfig:
        """The configuration that is wanted now; a running epoch takes it up at the next batch that allows it."""
        return self.found.config

    @property
    def best(self) -> LoaderConfig:
        """The best configuration that is known; while something is tried, that may be another one than `config`."""
        return self.found.best

    @property
    def kept(self) -> Finding | None:
        """Why the number of workers stays as it was asked for; None where another one runs, or may yet."""
        return self.found.kept

    @property
    def log(self) -> Log:
        """Every batch's history."""
        return self.found.log

    @property
    def result(self) -> TuningResult:
        """What was tried and found, as `tune()` returns it."""
        return self.found.result

    def __str__(self) -> str:
        return str(self.result)

    def report(self) -> str:
        """What was tried, what was found and what binds, as text; and why nothing was tried, where that is so."""
        return self.result.report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json` with the best configuration known: the next job begins where this one ended."""
        self.result.save(path)

    def freeze(self) -> None:
        """Try and change nothing any more."""
        self.tune = False
        self.found.tuner.freeze()

    def _get_iterator(self) -> Any:
        """As torch's, which `iter(loader)` calls for each epoch; with persistent workers once."""
        begun = time.monotonic()
        is_stream = isinstance(self.dataset, (IterableDataset, IterDataPipe, MapDataPipe))
        if is_stream or not self.in_order or (self.timeout and not self.num_workers):
            return super()._get_iterator()
        if self.num_workers:
            self.check_worker_number_rationality()
        return EpochIterator(self, *self._next_epoch(), begun)

    def _next_epoch(self) -> tuple[Shared, Order]:
        if self._of != self._settings():
            self._shared = self._fresh()
        if self._order is not None:
            self._order.leave()
        seed = None
        if self._seed is not None and self.persistent_workers:  # torch draws one for them once, when it starts them
            seed = mixed(self._seed, self._epochs) >> 1
        ahead = self.num_workers * (self.prefetch_factor or 0)
        self._order = Order(self._index_sampler, self.generator, ahead=ahead, seed=seed)
        self._seed = self._order.seed if seed is None else self._seed
        self._epochs += 1
        return self._shared, self._order

    def _settings(self) -> tuple[Any, ...]:
        """Torch lets everybody set `num_workers`, `collate_fn` and others, and by a trick the dataset: another loader, then."""
        parts = self.dataset, self.collate_fn, self.worker_init_fn, self._index_sampler
        numbers = self.num_workers, self.prefetch_factor, self.pin_memory, self.timeout, self.in_order
        return *map(id, parts), *numbers

    def _fresh(self) -> Shared:
        """Nothing is known of what the loader reads, and how: it is new, or attributes of it were set."""
        self._of, site, log, how = self._settings(), Site.of(self, self._line), Log(), self._how
        sent = Sent(self.dataset, self.collate_fn, self.worker_init_fn, self.batch_sampler is not None)
        alive, on_change = weakref.ref(sent), self.on_change  # a loop's iterator outlives a loader that has no name
        tuner = Tuner(
            log,
            LoaderConfig.from_loader(self),
            refused=self._kept_as_asked(),
            cores=usable_cores().usable,
            epoch_batches=length_of(self),
            max_workers=min(self.max_workers or MOST_WORKERS, _most_that_fit()),
            depth=how.get("prefetch_factor"),
            tried=_tried_at(site),
            on_tried=lambda tried: _keep(site, alive, tried),
            on_settled=lambda: None if on_change is None else on_change(found),
        )
        has_batched_fetch = hasattr(self.dataset, "__getitems__")
        found = Found(site=site, log=log, tuner=tuner, has_batched_fetch=has_batched_fetch)
        draws = not draws_nothing(self.dataset, self.collate_fn)
        # Workers that nobody asked for are forked: started anew they would run a script that has no `__main__` guard.
        context = self.multiprocessing_context or how.get("multiprocessing_context")
        return Shared(
            found=found,
            sent=sent,
            samplers={"batch_sampler" if self.batch_sampler is not None else "sampler": self._index_sampler},
            seeds=Seeds(Parts(sent.named).generators) if draws else None,
            context=context or (None if self.num_workers else "fork"),
            timeout_s=self.timeout or how.get("timeout", 0.0),
            pins=self.pin_memory and torch.accelerator.is_available(),
            keeps=self.persistent_workers or bool(how.get("persistent_workers")),
        )

    def _kept_as_asked(self) -> Finding | None:
        if not self.tune:
            return Kept.FROZEN()
        if isinstance(self.dataset, IterableDataset):
            return Kept.ITERABLE()
        if not self.in_order:
            return Kept.OUT_OF_ORDER()
        if not self.workers:
            return Kept.NO_CONSENT()
        if self.worker_init_fn is not None and is_users(getattr(self.worker_init_fn, "__module__", None)):
            return Kept.WORKER_INIT()
        if current_process().daemon:
            return Kept.CANNOT_START(why="this process is daemonic, which may have no children.")
        return None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a loader that is sent to another process, has no epoch running and knows nothing."""
        return {**self.__dict__, **dict.fromkeys(("_iterator", "_order", "_shared", "_of"))}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._shared = self._fresh()


def _tried_at(site: Site) -> Tried | None:
    known = _tried.get(site)
    return None if known is None or known[0]() is not None else known[1]


def _keep(site: Site, owner: weakref.ref[Sent], tried: Tried) -> None:
    if site.line != NOWHERE:
        _tried.pop(site, None)
        _tried[site] = owner, tried
        if len(_tried) > MOST_SITES:
            del _tried[next(iter(_tried))]


def _most_that_fit() -> int:
    available = memory_budget().available_bytes
    return MOST_WORKERS if available is None else min(MOST_WORKERS, max(1, available // 2 // WORKER_BYTES))
