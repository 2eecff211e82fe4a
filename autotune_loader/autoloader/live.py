"""What is known of one loader, and what torch's `_get_iterator` is replaced by, for AutoLoader and `run` alike.

Found (without the loader and its data, which it outlives) ── Live (kept on the loader) ── iterator_of
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import random
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, MapDataPipe, RandomSampler, SequentialSampler

from autotune_loader.autoloader.iterator import ElasticIter
from autotune_loader.autoloader.late import Pace
from autotune_loader.autoloader.meter import measured
from autotune_loader.autoloader.seeds import GENERATORS, objects_in
from autotune_loader.autoloader.segments import SMALL_BYTES
from autotune_loader.autoloader.tuner import GATE_BATCHES, WAITING, Room, Tuner
from autotune_loader.diagnosis import Advice, Caution, Finding, Kept, judged
from autotune_loader.lines import Line
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.limits import local_world_size, memory_budget, usable_cores
from autotune_loader.machine.nursery import Home
from autotune_loader.machine.processes import private_bytes
from autotune_loader.pipeline.loop_log import Log, Site
from autotune_loader.pipeline.workload import draws_nothing, length_of
from autotune_loader.results.result import TuningResult
from autotune_loader.search.space import MOST_WORKERS
from autotune_loader.values import TORCH_PREFETCH_FACTOR, Interval, LoaderConfig, Trial, averaged

LIVE, KEPT = "_autotune_loader_live", "_autotune_loader_kept"
"""Attributes of a loader."""
_making = threading.RLock()
WORKER_BYTES = 1 << 27
"""Memory that a worker is counted with before one has run."""
MEMORY_SHARE, AHEAD_SHARE, LOW_SHARE = 0.5, 0.05, 0.05
"""Of the memory that is left, what further workers may take, and batches that wait for the loop; of all memory, what is too
little for those that run."""
AHEAD_BYTES, MOST_AHEAD, AHEAD_EVERY_S = 1 << 28, 1000, 5.0
"""What such batches may take where the system does not tell; the most of them; how often memory is looked at."""
SEEDS_ONLY = {
    "torch", "numpy", "np", "random", "initial_seed", "seed", "manual_seed", "manual_seed_all", "cuda", "get_state",
    "int", "worker_id",
}  # fmt: skip
"""Names in a `worker_init_fn` that seeds and does nothing else, as in PyTorch's notes on reproducibility."""
SEEDERS = {
    "torch.random.manual_seed", "lightning.fabric.utilities.seed.pl_worker_init_function",
    "lightning_fabric.utilities.seed.pl_worker_init_function", "transformers.trainer_utils.seed_worker",
}  # fmt: skip
"""Functions of libraries that do the same, by name, as `torch.compile` wraps torch's: Lightning's
`seed_everything(workers=True)` and Hugging Face's Trainer set the others."""


class Told(int):
    """A number of workers that the script did not write, and the number that it asked for: 0 where nobody did.

    Whoever makes or copies a loader from another's attributes hands that on.
    """

    asked = 0

    @classmethod
    def of(cls, workers: int, asked: int) -> Told:
        told = cls(workers)
        told.asked = asked
        return told


UNASKED = Told(0)


@dataclass(eq=False, kw_only=True)
class Found:
    """What an AutoLoader has found so far, and what its `on_change` is called with.

    It holds neither the loader nor its data, and outlives them.
    """

    site: Site
    """The line that makes the loader, and what it reads."""
    log: Log
    """The history of each batch."""
    tuner: Tuner
    has_batched_fetch: bool
    first: int = 0
    """Batches that were in the log before: those of loaders that the same line made."""
    starts_anew: Finding | None = None
    """Why workers start as their start method does it, where they could be cloned otherwise."""

    @property
    def config(self) -> LoaderConfig:
        """The settings of the next batch."""
        return self.tuner.wanted

    @property
    def best(self) -> LoaderConfig:
        """The best settings so far."""
        return self.tuner.best

    @property
    def gain(self) -> Interval | None:
        """Rate of the best settings over that of the loader's own; without limits if no A/B rounds were needed."""
        return self.tuner.gain

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
            warnings=tuple(each for each in (self.kept, self.starts_anew) if each is not None),
            trials=trials,
            seconds=round(self.log.totals.active_s, 3),
            machine=inspect_machine().fingerprint(dataset=self.site.dataset),
        )
        found = judged(found, has_batched_fetch=self.has_batched_fetch, parent=self.log.parent)
        if not tuner.none_would_be_faster:
            return found
        return replace(found, advice=(Advice.WITHOUT_WORKERS(), *found.advice))

    def _trials(self) -> tuple[Trial, ...]:
        known = self.tuner.measured
        rows = self.log.since(self.first)
        if not known and len(rows) >= GATE_BATCHES and (seen := measured(rows)) is not None:
            known = {self.tuner.asked: [seen]}
        return tuple(
            Trial(number=number, config=config, measurement=averaged(all_), seconds=sum(each.window_s for each in all_))
            for number, (config, all_) in enumerate(known.items())
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may be done with a loader."""

    allow_workers: bool = False
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
    log: Log | None = None
    """Where the batches are noted; None for a new one."""


class Live:
    """What all iterators of one loader share; the loader itself is not kept.

    Attributes:
        told: `num_workers` and `prefetch_factor` of the loader as they were set last, by it or here.
        method: How workers start that nobody asked for.
        has_init_fn: Whether a `worker_init_fn` does more than seed.
        is_seeded: Whether each batch's random numbers are its own.
        objects, held, files: What the dataset consists of; generators of random numbers and descriptors among it.
        equal: Batches of workers that were the loop's own.
        batch_bytes, slowest_s: Of the largest batch so far, and of the one that took longest to make.
        pace: How long batches take workers.
        drawn_until: The batch that the sampler may be drawn ahead to without drawing random numbers that a `break` leaves.
        draws: Whether a batch may need random numbers.
    """

    def __init__(self, loader: Any, line: Line | None, asked: LoaderConfig, options: Options) -> None:
        self._owner, self._parts = weakref.ref(loader), _parts(loader)
        self.told: tuple[Any, Any] = loader.num_workers, loader.prefetch_factor
        self.on_change, self.fetch_threads, self.how = options.on_change, options.fetch_threads, options.how
        self.method = _method(self.how.get("multiprocessing_context"))
        self.has_init_fn = loader.worker_init_fn is not None and not _only_seeds(loader.worker_init_fn)
        refused = _kept_as_asked(loader, asked, options, has_init_fn=self.has_init_fn)
        cores, log = usable_cores().usable, options.log or Log()
        most = options.max_workers or max(MOST_WORKERS, cores, asked.num_workers)
        self.tuner = Tuner(
            log,
            asked,
            refused=refused,
            cores=cores,
            epoch_batches=None if refused else _epoch_batches(loader),
            max_workers=most,
            depth=self.how.get("prefetch_factor"),
            is_kept=bool(self.how.get("persistent_workers") or loader.persistent_workers),
        )
        has_batched_fetch = hasattr(loader.dataset, "__getitems__")
        site, first = Site.of(loader, line), log.end
        self.found = Found(site=site, log=log, tuner=self.tuner, has_batched_fetch=has_batched_fetch, first=first)
        # With a timeout and no workers torch's own raises.
        self.is_torchs = not loader.in_order or (
            not asked.num_workers and (refused is not None or bool(loader.timeout))
        )
        self.is_seeded = not (_is_stream(loader) or self.has_init_fn)
        self.objects, self.held, self.files = list[Any](), list[Any](), set[int]()
        batches = loader._index_sampler
        samplers = batches, getattr(batches, "sampler", batches)
        self.is_torchs_sampler = all(type(each).__module__.startswith("torch.") for each in samplers)
        self.drawn_until = _drawn_until(loader, samplers[1]) if self.is_torchs_sampler else 0
        self.draws = self.is_seeded and not draws_nothing(loader.dataset, loader.collate_fn)
        self.equal, self.batch_bytes, self.slowest_s, self.pace = 0, 0, 0.0, Pace()
        self._most_ahead, self._ahead_until = 0, -math.inf
        self.home = Home()

    def __reduce__(self) -> Any:
        """A copy of the loader, or one that is sent to another process, knows nothing."""
        return type(None), ()

    def is_of(self, loader: Any) -> bool:
        """Whether the loader is still what is known here: it is the same one, and nothing of it was set anew."""
        return self._owner() is loader and self._parts == _parts(loader) and self.is_as_told(loader)

    def walk(self, loader: Any) -> None:
        """See what the dataset consists of now."""
        if self.draws:
            self.objects = objects_in(loader)
            self.held = [each for each in self.objects if isinstance(each, GENERATORS)]
            self.files = set()
            for each in self.objects:
                with suppress(Exception):  # it is closed, or none of a file's
                    self.files.add(each.fileno())

    def is_as_told(self, loader: Any) -> bool:
        return self.told == (loader.num_workers, loader.prefetch_factor)

    def tell(self, config: LoaderConfig, method: str) -> None:
        """Let the loader's own numbers say what runs, from which people compute how far its sampler is ahead."""
        why = self.home.why_not
        self.found.starts_anew = None if why is None else Caution.STARTS_ANEW(method=method, why=why)
        told = Told.of(config.num_workers, self.tuner.asked.num_workers), config.prefetch_factor
        if (loader := self._owner()) is not None and self.told != told:
            loader.num_workers, loader.prefetch_factor = self.told = told

    def room(self, workers: Sequence[int]) -> Room:
        """How many workers fit into memory beside these, and batches into queues: shares of what is left to this rank."""
        budget = memory_budget()
        free, total = budget.available_bytes, budget.total_bytes
        batches = self._ahead(free)
        if free is None:
            most = self.tuner.most
        elif total is not None and free < LOW_SHARE * total:
            most, batches = max(1, len(workers) // 2), 0
        else:
            own = private_bytes(workers[-1]) if workers else None  # of one: it takes milliseconds
            each = (own or WORKER_BYTES) + TORCH_PREFETCH_FACTOR * self.batch_bytes
            most = len(workers) + int(MEMORY_SHARE * free / local_world_size() / each)
        return Room(most, batches, self.batch_bytes)

    def most_ahead(self, now: float) -> int:
        """How many batches may wait behind a late one beyond those that always may."""
        if now >= self._ahead_until:
            self._most_ahead, self._ahead_until = self._ahead(memory_budget().available_bytes), now + AHEAD_EVERY_S
        return self._most_ahead

    def _ahead(self, free: int | None) -> int:
        most_bytes = AHEAD_BYTES if free is None else AHEAD_SHARE * free / local_world_size()
        return min(MOST_AHEAD, int(most_bytes / max(self.batch_bytes, SMALL_BYTES)))


def live_of(loader: Any, line: Line | None, **options: Any) -> Live:
    """What is known of a loader that was made at this line; made anew where its parts or numbers were set to other ones."""
    with _making:  # a thread may ask for figures while another one begins
        live: Live | None = vars(loader).get(LIVE)
        if live is None or not live.is_of(loader):
            asked, chosen = LoaderConfig.from_loader(loader), Options(**options)
            if isinstance(loader.num_workers, Told):  # of a copy
                asked = asked.with_workers(loader.num_workers.asked)
            if live is not None and live.is_as_told(loader):
                asked = live.tuner.asked
            elif chosen.config is not None and (chosen.config.num_workers or not asked.num_workers):
                asked = asked.with_workers(chosen.config.num_workers, chosen.config.prefetch_factor)
            vars(loader)[LIVE] = live = Live(loader, line, asked, chosen)
        return live


def iterator_of(loader: Any, live: Live, torchs: Callable[[], Any]) -> Any:
    """The elastic iterator of a loader; torch's own, which `torchs` makes, where nothing may differ from it by a draw."""
    asked = live.tuner.asked.num_workers
    if live.is_torchs:
        return torchs()
    context = loader.multiprocessing_context if asked else multiprocessing.get_context(live.method)
    live.found.log.workers_start(context, is_elastic=True)
    if asked and loader.num_workers == asked:
        loader.check_worker_number_rationality()
    if asked or not live.how.get("persistent_workers"):  # torch keeps the iterator of workers that were asked for
        return ElasticIter(loader, live)
    kept: Keeper | None = vars(loader).get(KEPT)
    if kept is None or not kept.iterator.may_begin_again(live):
        kept = vars(loader)[KEPT] = Keeper(ElasticIter(loader, live))
    else:
        kept.iterator._reset(loader)
    return kept.iterator


class Keeper:
    """Keeps the iterator whose persistent workers nobody asked for; a copy of the loader has none."""

    def __init__(self, iterator: ElasticIter) -> None:
        self.iterator = iterator

    def __reduce__(self) -> Any:
        return type(None), ()


def _parts(loader: Any) -> tuple[int, ...]:
    return tuple(map(id, (loader.dataset, loader.collate_fn, loader.worker_init_fn, loader._index_sampler)))


def _is_stream(loader: Any) -> bool:
    return isinstance(loader.dataset, (IterableDataset, IterDataPipe, MapDataPipe))


def _epoch_batches(loader: Any) -> int | None:
    """Batches of an epoch, where torch's own samplers say so; another one's length may be its whole iteration."""
    sampler = loader._index_sampler
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return length_of(sampler) if type(inner) in (RandomSampler, SequentialSampler) else None


def _drawn_until(loader: Any, sampler: Any) -> float:
    """The batch that a sampler of torch's may be drawn ahead to: beyond, it may draw from a generator that the script has."""
    if getattr(sampler, "generator", None) is None:
        return math.inf
    is_once = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    return (_epoch_batches(loader) or 1) - 1 if is_once else 0


def _method(context: Any) -> str:
    """The start method that the script says, else fork: a process that nobody asked for needs no import of the script."""
    if context is None:
        return multiprocessing.get_start_method(allow_none=True) or "fork"
    return context if isinstance(context, str) else str(context.get_start_method())


def _only_seeds(init_fn: Any) -> bool:
    """Whether a `worker_init_fn` does nothing but seed, which the seeds of batches do, too."""
    while isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    if init_fn in (random.seed, np.random.seed):
        return True
    if f"{getattr(init_fn, '__module__', '')}.{getattr(init_fn, '__qualname__', '')}" in SEEDERS:
        return True
    return isinstance(init_fn, types.FunctionType) and _names_in(init_fn.__code__) <= SEEDS_ONLY


def _names_in(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names_in, inner))


def _kept_as_asked(loader: Any, asked: LoaderConfig, options: Options, *, has_init_fn: bool) -> Finding | None:
    """Why the number of workers stays; None where it may change."""
    workers = asked.num_workers
    reasons = {
        Kept.FROZEN: not options.tune,
        Kept.ITERABLE: _is_stream(loader),
        Kept.OUT_OF_ORDER: not loader.in_order,
        Kept.NO_CONSENT: not workers and not options.allow_workers,
        Kept.ONE_WORKER: workers == 1,
        Kept.WORKER_INIT: has_init_fn,
        Kept.DAEMONIC: multiprocessing.current_process().daemon,
    }
    return next((why() for why, applies in reasons.items() if applies), None)
