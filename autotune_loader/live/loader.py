"""`AutoLoader`, as training loops and frameworks see it: a DataLoader that tunes itself while it trains."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from multiprocessing import current_process
from typing import Any, Generic, Literal, TypeVar

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.live.arguments import NEEDS_WORKERS, asked_for
from autotune_loader.live.budgets import Budgets
from autotune_loader.live.epoch import EpochIterator, LoaderState
from autotune_loader.live.findings import Findings
from autotune_loader.live.order import Order, Source, drawn_again, restore_own, settle, states_of
from autotune_loader.live.pool import Parts, refuse_children_of_daemons
from autotune_loader.live.rebuilt import forget, keep, left_by_another
from autotune_loader.live.saved import SCHEMA_VERSION, check_saved
from autotune_loader.live.seeds import LoopSeeds, draws_nothing, mixed
from autotune_loader.live.step_threads import StepThreads
from autotune_loader.live.traces import LiveTraces
from autotune_loader.live.tuner import Event, Job
from autotune_loader.live.tuning import LiveTuning, cores_within
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.stages import StageTally
from autotune_loader.pipeline.workload import DataSide, length_of
from autotune_loader.results.known_jobs import job_key, recall, remember
from autotune_loader.results.load import find_loader_file, load_config
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError
from autotune_loader.values.lines import users_line
from autotune_loader.values.validation import require_bool

T = TypeVar("T")
FIRST_WORKERS = 2
"""What a loader begins with that was told nothing."""
MOST_REPORTS = 2000
"""Of what watched workers are at: with ten a second from each, the latest minutes."""

log = logging.getLogger(__name__)


class AutoLoader(Findings, DataLoader[T], Generic[T]):
    """A DataLoader that tunes its workers and prefetching while it trains, and delivers what a plain one would.

    Training itself is measured, batch by batch. Where the loop waits for data, other configurations are tried in its midst, for
    at most 1 % of the time trained (2 s more to begin with); what turns out slower is taken back. Then it is silent, until the
    rate shifts for good.

    Order, number of batches and the global random state afterwards are those of `DataLoader` with the same arguments,
    whatever was changed in between; each batch's random numbers come from (seed of the epoch, number of the batch), so that
    augmentations do not depend on the number of workers. With 0 workers `random` and numpy are looked after only where the
    dataset is seen to draw from them, in the first batches or in every 128th.

    Lost workers are replaced and their batches fetched again. An IterableDataset is only watched, as its samples depend on
    its workers; `change_to` changes it between epochs, and the loss of one of its workers raises torch's error.

    Args:
        dataset: as for DataLoader, or a DataLoader, which is only read.
        *args: as for DataLoader.
        config: what to start with: a configuration or a `loader.json`. It wins over `num_workers`, `prefetch_factor` and
            `pin_memory`; the order never depends on it. Without it and `num_workers`: a `loader.json` that is found as
            `load_config()` finds it, else what an earlier AutoLoader or `tune()` found best for these data on this machine
            (`AUTOTUNE_LOADER_CACHE=off` forgets it), else 2 workers, which give way to none where the dataset cannot be
            loaded in workers.
        worker_seeds: "batch" seeds by batch; "torch" by worker, as DataLoader does.
        tune: False only watches: `report()` says what binds.
        stages: watch the workers for where a sample's time goes, at about 1 % of their time, so that `report()` tells. The
            timer of CPU time (SIGPROF) is then taken in them.
        step_threads: "auto" tries fewer intra-op threads for a step on the CPU, too, which then has the cores that its workers
            leave it. They are the whole process' (`torch.set_num_threads`), and sums may round otherwise. None leaves them.
        on_change: called with an `Event` whenever the loader has settled on a configuration, for a logger. A line says so in
            the log at INFO, or on a terminal where that is not listened to.
        max_workers: most worker processes at any time.
        max_cores: cores that may be counted on.
        max_host_memory: most bytes of workers and the batches they hold.
        max_shm: most bytes of shared memory that batches take.
        **arguments: as for DataLoader; `num_workers` is where it starts.

    Raises:
        TypeError: an argument that DataLoader does not have.
        ValueError: as DataLoader; a configuration above a budget; workers in a process that may not have children.
    """

    def __init__(  # noqa: PLR0913 - all that a user may say
        self,
        dataset: Any,
        *args: Any,
        config: LoaderConfig | str | os.PathLike[str] | None = None,
        worker_seeds: Literal["batch", "torch"] = "batch",
        tune: bool = True,
        stages: bool = False,
        step_threads: Literal["auto"] | None = None,
        on_change: Callable[[Event], None] | None = None,
        max_workers: int | None = None,
        max_cores: int | None = None,
        max_host_memory: int | None = None,
        max_shm: int | None = None,
        **arguments: Any,
    ) -> None:
        if worker_seeds not in ("batch", "torch"):
            raise ValueError(
                f"worker_seeds={worker_seeds!r} is not 'batch' or 'torch'; worker_seeds='batch' would work"
            )
        if step_threads not in ("auto", None):
            raise ValueError(f"step_threads={step_threads!r} is not 'auto' or None; step_threads='auto' would work")
        for name, value in (("tune", tune), ("stages", stages)):
            require_bool(name, value)
        asked = asked_for(dataset, args, arguments, own=inspect.signature(AutoLoader).parameters)
        self._wished_context = asked.get("multiprocessing_context")
        self._is_told = config is not None or "num_workers" in asked
        wishes = {name: asked[name] for name in NEEDS_WORKERS[:2] if asked.get(name)}
        if not asked.get("num_workers"):
            asked = {name: value for name, value in asked.items() if name not in NEEDS_WORKERS}
        super().__init__(**asked)
        self.worker_seeds, self.max_workers = worker_seeds, max_workers
        self.tune, self.max_cores, self.on_change = tune, max_cores, on_change
        self._tuning = None
        self.max_host_memory, self.max_shm = max_host_memory, max_shm
        is_seeded = worker_seeds == "batch" and not draws_nothing(self.dataset, self.collate_fn)
        self._loop_seeds = LoopSeeds() if is_seeded else None
        self._seed: int | None = None
        self._epochs = 0
        self._saved: Mapping[str, Any] | None = None
        self._job: str | None = None
        self._made_at: Hashable = None
        self._kept: EpochIterator | None = None
        self._latest: weakref.ref[EpochIterator] | None = None
        self._order: Order | None = None
        self._workers_of_epoch = 0
        budgets = Budgets(max_workers=max_workers, max_host_memory=max_host_memory, max_shm=max_shm)
        self._state = LoaderState(
            config=LoaderConfig(),
            budgets=budgets,
            stages=StageTally(MOST_REPORTS) if stages else None,
            threads=StepThreads(cores_within(max_cores)) if step_threads else None,
        )
        self._own = self._allowed(self._start(config))
        self._state.config = self._allowed(self._first(self._own, wishes))
        self._state.own = self._own if tune else None
        if tune:
            self._made_at = (
                users_line(sys._getframe(1), libraries=True),
                type(self.dataset),
                length_of(self.dataset),
                self.batch_size,
                self._own,
                budgets,
            )

    @property
    def config(self) -> LoaderConfig:
        """The configuration that is wanted now; a running epoch takes it up at the next batch that allows it."""
        return self._state.config

    @property
    def traces(self) -> LiveTraces:
        """Every batch's history, and when the configuration changed."""
        return self._state.traces

    @property
    def losses(self) -> int:
        """How often workers were lost and replaced."""
        return self._state.losses

    def freeze(self) -> None:
        """Try and change nothing any more."""
        self.tune = False
        forget(self._made_at)
        self._made_at = None
        if self._tuning is not None:
            self._tuning.freeze()

    def change_to(self, config: LoaderConfig) -> None:
        """Go on with another configuration, in the midst of the epoch where the dataset has indices; it is not tuned further.

        Args:
            config: what to change to. Order of delivery, batch size and dropping of the last batch stay as they are.

        Raises:
            ValueError: as the constructor; or the configuration has another batch size or `drop_last`.
        """
        self._change(config)
        self._state.own = None
        self.freeze()

    def _change(self, config: LoaderConfig) -> None:
        allowed = self._allowed(config)
        if allowed != self._state.config:
            self._state.config = allowed
        if allowed.persistent_workers and self._latest is not None:
            self._kept = self._kept or self._latest()

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the dataset, those that want to know, which epoch comes next."""
        tellable: tuple[Any, ...] = (
            self.batch_sampler,
            getattr(self.batch_sampler, "sampler", None),
            self.sampler,
            self.dataset,
        )
        for told in tellable:
            if hasattr(told, "set_epoch"):
                told.set_epoch(epoch)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return super().__iter__()  # they carry a configuration of their own into the workers
        order, skipped = self._next_order()
        self._known().begin_epoch()  # first: it may have been learnt by another
        iterator = self._kept if self.config.persistent_workers else None
        if iterator is None:
            self._kept, iterator = None, EpochIterator(self._state)
        if self.config.persistent_workers:
            self._kept = iterator  # as torch: whoever iterates again gets the same iterator, started over
        self._latest, self._order = weakref.ref(iterator), order
        if self._made_at is not None:
            keep(self._made_at, self.learnt, self, iterator)
        self._workers_of_epoch = self.config.num_workers
        iterator.begin(self._parts(), order)
        for _ in range(skipped):
            next(iterator)
        self._epochs += 1
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a loader that is sent to another process, has no epoch running; as torch's iterators are not sent."""
        kept = self._state
        stages = None if kept.stages is None else StageTally(MOST_REPORTS)
        state = LoaderState(config=kept.config, budgets=kept.budgets, own=kept.own, stages=stages, threads=kept.threads)
        fresh = dict.fromkeys(("_latest", "_kept", "_order", "_tuning", "_made_at"))
        return {**self.__dict__, **fresh, "_state": state}

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, for `load_state_dict` of another one with the same dataset and arguments.

        In mid-epoch, also after `break`, batches count as had once the loop has received them. Nothing is fetched; it may be
        called at any time.
        """
        source, order, epoch = _source_of(self), self._order, None
        if order is not None and not order.is_over:
            delivered, missing = order.position()
            epoch = {
                "begun_with": order.begun_with,
                "draws_seed": order.drew_seed,
                "seed": order.seed,
                "delivered": delivered,
                "missing": missing,
                "stream": order.received,
                "workers": self._workers_of_epoch,
            }
        return {
            "schema_version": SCHEMA_VERSION,
            "samples": length_of(self.dataset),
            "batch_size": self.batch_size,
            "config": self.best.to_dict(),
            "epochs": self._epochs,
            "seed": self._seed,
            "own": states_of(source),
            "epoch": epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, in the next iteration; the number of workers may be another.

        The process' own random state is the training's to restore. An IterableDataset has no indices: what was delivered is
        fetched once more and dropped, with as many workers as then.

        Raises:
            ValueError: the state is of another dataset or batch size, or of an IterableDataset with another number of workers.
        """
        workers = self.config.num_workers if isinstance(self.dataset, IterableDataset) else None
        check_saved(state, samples=length_of(self.dataset), batch_size=self.batch_size, workers=workers)
        self._saved, self._kept, self._latest, self._order = state, None, None, None
        forget(self._made_at)
        self._made_at = None
        self._epochs, self._seed = state["epochs"], state["seed"]
        if self.tune and workers is None and "config" in state:
            self._change(LoaderConfig.from_dict(state["config"]))  # what was learnt

    def _next_order(self) -> tuple[Order, int]:
        """The order of the next epoch, and how many batches of a stream are to be passed over."""
        source, saved = _source_of(self), self._saved
        self._saved = None
        if self._order is not None and not isinstance(self.dataset, IterableDataset):
            settle(source, self._order)
        if saved is not None and saved["epoch"] is not None:
            self._epochs -= 1
            return drawn_again(source, saved["epoch"]), saved["epoch"]["stream"]
        if saved is not None:
            restore_own(source, saved["own"])
        if self._seed is not None and self.persistent_workers:
            # Torch draws a seed for the workers once, when it starts them.
            return Order(source, seed=mixed(self._seed, self._epochs) >> 1), 0
        order = Order(source)
        self._seed = order.seed
        return order, 0

    def _parts(self) -> Parts:
        return Parts(
            dataset=self.dataset,
            is_stream=isinstance(self.dataset, IterableDataset),
            batched=self.batch_sampler is not None,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            collate_fn=self.collate_fn,
            worker_init_fn=self.worker_init_fn,
            timeout=self.timeout,
            context=self._wished_context,
            stages=self._state.stages is not None,
            loop_seeds=self._loop_seeds,
        )

    def _known(self) -> LiveTuning:
        if self._tuning is None and (left := left_by_another(self._made_at)) is not None:
            self.go_on_from(*left)
            left[1].on_change = _announcing(self.on_change, self._job)
        if self._tuning is None:
            self._tuning = self._begun()
        return self._tuning

    def _begun(self) -> LiveTuning:
        is_fixed = not self.tune or isinstance(self.dataset, IterableDataset) or current_process().daemon
        job = Job(
            start=self._own,
            usable_cores=cores_within(self.max_cores),
            max_workers=self.max_workers,
            epoch_batches=length_of(self),
            step_threads=(None,) if self._state.threads is None else self._state.threads.counts,
            is_fixed=is_fixed,
        )
        may_keep = not is_fixed and not self._has_epochs()
        return LiveTuning(
            self._state, self._change, job, may_keep_workers=may_keep, on_change=_announcing(self.on_change, self._job)
        )

    def _first(self, own: LoaderConfig, wishes: dict[str, Any]) -> LoaderConfig:
        """What to begin with: the user's own, or what a file knows, or two workers."""
        if self._is_told or not self.tune or isinstance(self.dataset, IterableDataset) or current_process().daemon:
            return own
        try:
            found = load_config(find_loader_file())
            return self._allowed(replace(found, pin_memory=own.pin_memory))
        except (TunerError, ValueError) as error:
            log.debug("no file to begin with: %s", error)
        self._job = job_key(DataSide.from_loader(self), inspect_machine().fingerprint())
        known = recall(self._job)
        if known is not None:
            try:
                threads = known.consumer_threads if self._state.threads is not None else None
                known = replace(known, batch_size=None, drop_last=None, consumer_threads=threads)
                return self._allowed(replace(known, pin_memory=own.pin_memory))
            except ValueError as error:
                log.debug("what is known of this job is not to be used: %s", error)
        workers = FIRST_WORKERS if self.max_workers is None else min(FIRST_WORKERS, self.max_workers)
        if not workers:
            return own
        context = self._wished_context if isinstance(self._wished_context, str) else None
        return replace(own, num_workers=workers, multiprocessing_context=context, **wishes)

    def _has_epochs(self) -> bool:
        return DataSide(dataset=self.dataset, batch_size=self.batch_size).has_epochs

    def _start(self, config: LoaderConfig | str | os.PathLike[str] | None) -> LoaderConfig:
        if isinstance(config, LoaderConfig):
            return config
        if config is not None:
            return load_config(config)
        return LoaderConfig(
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=bool(self.pin_memory),
            persistent_workers=self.persistent_workers,
        )

    def _allowed(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration as far as it is this loader's to change."""
        if config.batch_size not in (None, self.batch_size):
            raise ValueError(
                f"batch_size={config.batch_size} of the configuration is not that of the loader ({self.batch_size}), which "
                f"does not change; batch_size={self.batch_size} would work"
            )
        if config.drop_last not in (None, self.drop_last):
            raise ValueError(
                f"drop_last={config.drop_last} of the configuration is not that of the loader; drop_last=None would work"
            )
        refuse_children_of_daemons(config)
        self._state.budgets.refuse(config, self._state.shape)
        if not config.num_workers:
            return config
        # Kept workers never hear of the dataset's new epoch, unless the user wants it so.
        keeps = config.persistent_workers and (self.persistent_workers or not self._has_epochs())
        return replace(config, in_order=self.in_order, persistent_workers=keeps)


def _announcing(on_change: Callable[[Event], None] | None, job: str | None) -> Callable[[Event], None]:
    def settled(event: Event) -> None:
        if job is not None:
            remember(job, event.config)
        _say(f"settled on {event.config} after {event.seconds:.0f} s of training")
        if on_change is not None:
            on_change(event)

    return settled


def _say(text: str) -> None:
    """To the log where it is listened to, else to a terminal, above what is drawn there."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, markup=False, emoji=False).print(f"AutoLoader {text}")


def _source_of(loader: AutoLoader[Any]) -> Source:
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    ahead = 0 if isinstance(loader.dataset, IterableDataset) else loader.num_workers * (loader.prefetch_factor or 0)
    return Source(sampler=sampler, generator=loader.generator, workers=loader.num_workers, ahead=ahead)
