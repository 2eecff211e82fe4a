"""`AutoLoader`, as training loops and frameworks see it: a DataLoader that tunes itself while it trains."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import current_process
from operator import attrgetter
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.autoloader.asked import asked_for
from autotune_loader.autoloader.epoch import EpochIterator, Shared
from autotune_loader.autoloader.found import Found
from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.seeds import mixed
from autotune_loader.autoloader.tuner import MOST_WORKERS, Tuner
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.lines import users_line
from autotune_loader.machine.host import require_linux
from autotune_loader.machine.limits import memory_budget, usable_cores
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.pipeline.site import Site
from autotune_loader.pipeline.workload import is_users, length_of
from autotune_loader.results.file import load_config
from autotune_loader.values import LoaderConfig, Round, require_bool

require_linux("AutoLoader")

T = TypeVar("T")
WORKER_BYTES = 1 << 27
"""Memory of its own that a worker is counted with, and its batches."""


@functools.lru_cache(maxsize=256)
def _latest(site: Site) -> list[list[Round]]:  # noqa: ARG001 - by which it is kept
    """The rounds of a site's latest loader, from which the next one goes on."""
    return [[]]


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
        on_change: called with `loader.found` each time that another configuration is best, such as for a logger.
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
        asked = asked_for(dataset, args, arguments, config, workers=workers)
        super().__init__(**asked.arguments)
        # Public attributes are arguments: who makes a loader anew from another's (Lightning, Accelerate) gets the same one.
        self.tune, self.on_change, self.max_workers, self.workers = tune, on_change, max_workers, asked.may_use_workers
        self._how = asked.how
        self._seed: int | None = None
        self._epochs = 0
        self._order: Order | None = None
        self._line = users_line(sys._getframe(1), libraries=True)
        self._shared = self._fresh()

    found = property(attrgetter("_shared.found"), doc="What is known; it lives on without loader and data.")
    config = property(attrgetter("found.config"), doc="What runs from the next batch on that allows it.")
    best = property(attrgetter("found.best"), doc="The best configuration that is known.")
    kept = property(attrgetter("found.kept"), doc="Why the number of workers stays; None where it does not.")
    log = property(attrgetter("found.log"), doc="Every batch's history.")
    result = property(attrgetter("found.result"), doc="What was tried and found, as `tune()` returns it.")

    def __str__(self) -> str:
        return str(self.result)

    def report(self) -> str:
        """What was tried, what was found and what binds, as text; and why nothing was tried, where that is so."""
        return self._shared.found.result.report()

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
        self.check_worker_number_rationality()
        return EpochIterator(self, begun, *self._next_epoch())

    def _next_epoch(self) -> tuple[Shared, Order]:
        if self._of != self._settings():
            self._shared = self._fresh()
        if self._order is not None:
            self._order.leave()
        # Torch draws one for persistent workers once, when it starts them.
        seed = mixed(self._seed, self._epochs) >> 1 if self._seed is not None and self.persistent_workers else None
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
        free = memory_budget().available_bytes
        fit = MOST_WORKERS if free is None else max(1, free // 2 // WORKER_BYTES)
        latest = [[]] if self._line is None else _latest(site)
        tuner = Tuner(
            log,
            LoaderConfig.from_loader(self),
            refused=self._kept_as_asked(),
            cores=usable_cores().usable,
            epoch_batches=length_of(self),
            max_workers=min(self.max_workers or MOST_WORKERS, fit),
            depth=how.get("prefetch_factor"),
            earlier=latest[0],
        )
        latest[0] = tuner.rounds
        has_batched_fetch = hasattr(self.dataset, "__getitems__")
        return Shared(self, Found(site=site, log=log, tuner=tuner, has_batched_fetch=has_batched_fetch), how)

    def _kept_as_asked(self) -> Finding | None:
        reasons = {
            Kept.FROZEN: not self.tune,
            Kept.ITERABLE: isinstance(self.dataset, IterableDataset),
            Kept.OUT_OF_ORDER: not self.in_order,
            Kept.NO_CONSENT: not self.workers,
            Kept.WORKER_INIT: is_users(getattr(self.worker_init_fn, "__module__", None)),
            Kept.DAEMONIC: current_process().daemon,
        }
        return next((why() for why, applies in reasons.items() if applies), None)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a loader that is sent to another process, has no epoch running and knows nothing."""
        return {**self.__dict__, **dict.fromkeys(("_iterator", "_order", "_shared", "_of"))}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._shared = self._fresh()
