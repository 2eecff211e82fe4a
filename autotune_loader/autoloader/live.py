"""What is known of one loader, and what torch's `_get_iterator` is replaced by, for AutoLoader and `run` alike.

Found (without the loader and its data, which it outlives) ── Live (kept on the loader) ── iterator_of
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, MapDataPipe, RandomSampler, SequentialSampler

from autotune_loader.autoloader.iterator import AskedIter
from autotune_loader.autoloader.meter import measured
from autotune_loader.autoloader.tuner import GATE_BATCHES, MOST_WORKERS, WAITING, Tuner
from autotune_loader.autoloader.unasked import UnaskedIter
from autotune_loader.diagnosis import Advice, Finding, Kept, judged
from autotune_loader.lines import Line
from autotune_loader.machine.facts import inspect_machine, start_method
from autotune_loader.machine.limits import local_world_size, memory_budget, usable_cores
from autotune_loader.machine.processes import tree_pss
from autotune_loader.pipeline.loop_log import Log, Site
from autotune_loader.pipeline.workload import is_users, length_of
from autotune_loader.report.result import TuningResult
from autotune_loader.values import LoaderConfig, Trial, averaged

LIVE = "_autotune_loader_live"
"""Attribute of a loader."""
_making = threading.RLock()
WORKER_BYTES = 1 << 27
"""Memory that a worker is counted with before one has run."""
MEMORY_SHARE, MEMORY_EVERY_S = 0.5, 30.0
"""Of the memory that is left, the share that further workers may take; how often it is looked at."""


@dataclass(eq=False, kw_only=True)
class Found:
    site: Site
    log: Log
    tuner: Tuner
    has_batched_fetch: bool

    config = property(attrgetter("tuner.wanted"), doc="The configuration that is wanted now.")
    best = property(attrgetter("tuner.best"), doc="The best configuration that is known.")
    gain = property(attrgetter("tuner.gain"), doc="How many times as fast as asked, where pairs show that.")

    @property
    def has_tried(self) -> bool:
        """Whether some batches were made by another number of workers than was asked for."""
        return self.tuner.is_trying or len(self.tuner.measured) > 1

    @property
    def kept(self) -> Finding | None:
        """Why the number of workers is what was asked for; None where it is another."""
        tuner = self.tuner
        if tuner.refused is not None or tuner.best != tuner.asked:
            return tuner.refused
        if tuner.is_trying:
            return Kept.NOT_SETTLED()
        if len(tuner.measured) > 1:
            return Kept.NOT_FASTER()
        seen = tuner.measured.get(tuner.asked)
        if seen is None or seen[-1].wait_share >= WAITING:
            return Kept.TOO_SHORT()
        return Kept.NOT_WAITING(wait=seen[-1].wait_share)

    @property
    def result(self) -> TuningResult:
        """As `tune()` returns it: what was measured of a configuration, all in all, is its trial."""
        tuner, trials = self.tuner, self._trials()
        own = next((trial.measurement for trial in trials if trial.config == tuner.best), None)
        found = TuningResult(
            best=tuner.best,
            status="partial" if tuner.is_trying or tuner.best not in tuner.measured else "complete",
            found_by="autoloader",
            baseline=tuner.asked,
            batch_size=self.site.batch_size,
            rate=None if own is None else own.samples_per_s,
            speedup=tuner.gain,
            wait_share=None if own is None else own.wait_share,
            warnings=() if self.kept is None else (self.kept,),
            trials=trials,
            seconds=round(self.log.totals.active_s, 3),
            machine=inspect_machine().fingerprint(dataset=self.site.dataset),
        )
        found = judged(found, has_batched_fetch=self.has_batched_fetch)
        if not tuner.none_would_be_faster:
            return found
        return replace(found, advice=(Advice.WITHOUT_WORKERS(), *found.advice))

    def _trials(self) -> tuple[Trial, ...]:
        known = self.tuner.measured
        if not known and len(self.log.rows) >= GATE_BATCHES and (seen := measured(self.log.rows)) is not None:
            known = {self.tuner.asked: [seen]}
        return tuple(
            Trial(number=number, config=config, measurement=averaged(all_), seconds=sum(each.window_s for each in all_))
            for number, (config, all_) in enumerate(known.items())
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may be done with a loader."""

    workers: bool | None = None
    """Whether workers may be used where none were asked for."""
    tune: bool = True
    max_workers: int | None = None
    config: LoaderConfig | None = None
    """Workers and prefetching in place of the loader's own."""
    on_change: Callable[[Found], None] | None = None
    fetch_threads: int | None = None
    """Threads that fetch the items of a batch in each worker."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """`prefetch_factor`, `persistent_workers`, `multiprocessing_context` and `timeout` of workers that nobody asked for."""


class Live:
    """What all iterators of one loader share; the loader itself is not kept.

    Attributes:
        told: `num_workers` and `prefetch_factor` of the loader as they were set last, by it or here.
        is_seeded: Whether each batch's random numbers are its own.
        equal, is_proven, fetched, parts, beside, slowest_s: What `UnaskedIter` knows.
    """

    def __init__(self, loader: Any, line: Line | None, asked: LoaderConfig, options: Options) -> None:
        self._owner, self._parts = weakref.ref(loader), _parts(loader)
        self.told: tuple[Any, Any] = loader.num_workers, loader.prefetch_factor
        self.on_change, self.fetch_threads, self.how = options.on_change, options.fetch_threads, options.how
        self._most, self._looked_s, self.batch_bytes = options.max_workers or MOST_WORKERS, 0.0, 0
        refused, log = _kept_as_asked(loader, asked, options), Log()
        self.tuner = Tuner(
            log,
            asked,
            refused=refused,
            cores=usable_cores().usable,
            epoch_batches=None if refused else _epoch_batches(loader),
            max_workers=self._most,
            depth=self.how.get("prefetch_factor"),
        )
        has_batched_fetch = hasattr(loader.dataset, "__getitems__")
        self.found = Found(site=Site.of(loader, line), log=log, tuner=self.tuner, has_batched_fetch=has_batched_fetch)
        # With a timeout and no workers torch's own raises.
        self.is_torchs = not loader.in_order or (
            not asked.num_workers and (refused is not None or bool(loader.timeout))
        )
        self.is_seeded = not (_is_stream(loader) or Kept.WORKER_INIT.said_by(refused))
        self.equal, self.is_proven, self.fetched, self.slowest_s = 0, False, 0, 0.0
        self.parts: Any = None
        self.beside: Any = None

    def __reduce__(self) -> Any:
        """A copy of the loader, or one that is sent to another process, knows nothing."""
        return type(None), ()

    def is_of(self, loader: Any) -> bool:
        """Whether the loader is still what is known here: it is the same one, and nothing of it was set anew."""
        return self._owner() is loader and self._parts == _parts(loader) and self.is_as_told(loader)

    def is_as_told(self, loader: Any) -> bool:
        return self.told == (loader.num_workers, loader.prefetch_factor)

    def tell(self, workers: int, depth: int | None) -> None:
        """Let the loader's own numbers say what runs, from which people compute how far its sampler is ahead."""
        loader = self._owner()
        if loader is not None and self.told != (workers, depth):
            loader.num_workers, loader.prefetch_factor = self.told = workers, depth

    def look_at_memory(self, workers: Sequence[Any], now: float) -> None:
        """How many workers fit: further ones may take half of what is left to this rank."""
        if now < self._looked_s + MEMORY_EVERY_S or self.tuner.refused is not None:
            return
        self._looked_s, free = now, memory_budget().available_bytes
        if free is not None:
            each = tree_pss([workers[0].pid]) if workers else None  # of one: it takes milliseconds
            ahead = (self.tuner.wanted.prefetch_factor or 2) * self.batch_bytes
            fit = len(workers) + int(MEMORY_SHARE * free / local_world_size() / ((each or WORKER_BYTES) + ahead))
            self.tuner.most = max(1, min(self._most, fit))


def live_of(loader: Any, line: Line | None, **options: Any) -> Live:
    """What is known of a loader that was made at this line; made anew where its parts or numbers were set to other ones."""
    with _making:  # a thread may ask for figures while another one begins
        live: Live | None = vars(loader).get(LIVE)
        if live is None or not live.is_of(loader):
            asked, chosen = LoaderConfig.from_loader(loader), Options(**options)
            if live is not None and live.is_as_told(loader):
                asked = live.tuner.asked
            elif chosen.config is not None and (chosen.config.num_workers or not asked.num_workers):
                asked = asked.with_workers(chosen.config.num_workers, chosen.config.prefetch_factor)
            vars(loader)[LIVE] = live = Live(loader, line, asked, chosen)
        return live


def iterator_of(loader: Any, live: Live, torchs: Callable[[], Any]) -> Any:
    """The elastic iterator of a loader; torch's own, which `torchs` makes, where nothing may differ from it by a draw."""
    begun, asked = time.monotonic(), live.tuner.asked.num_workers
    if live.is_torchs:
        return torchs()
    if not asked:
        return UnaskedIter(loader, live, begun)
    if loader.num_workers == asked:
        loader.check_worker_number_rationality()
    return AskedIter(loader, live, begun)


def _parts(loader: Any) -> tuple[int, ...]:
    return tuple(map(id, (loader.dataset, loader.collate_fn, loader.worker_init_fn, loader._index_sampler)))


def _is_stream(loader: Any) -> bool:
    return isinstance(loader.dataset, (IterableDataset, IterDataPipe, MapDataPipe))


def _epoch_batches(loader: Any) -> int | None:
    """Batches of an epoch, where torch's own samplers say so; another one's length may be its whole iteration."""
    sampler = loader._index_sampler
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return length_of(sampler) if type(inner) in (RandomSampler, SequentialSampler) else None


def _kept_as_asked(loader: Any, asked: LoaderConfig, options: Options) -> Finding | None:
    """Why the number of workers stays; None where it may change."""
    workers, init_fn = asked.num_workers, loader.worker_init_fn
    while isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    module = getattr(init_fn, "__module__", None)
    method = start_method()
    is_forked = options.how.get("multiprocessing_context") or method == "fork"
    reasons = {
        Kept.FROZEN: not options.tune,
        Kept.ITERABLE: _is_stream(loader),
        Kept.OUT_OF_ORDER: not loader.in_order,
        Kept.NO_CONSENT: not workers and not options.workers,
        Kept.ONE_WORKER: workers == 1,
        Kept.WORKER_INIT: is_users(module),
        Kept.START_METHOD: not workers and not is_forked,
        Kept.DAEMONIC: multiprocessing.current_process().daemon,
    }
    return next((why(method=method) for why, applies in reasons.items() if applies), None)
