"""`AutoLoader`, as training loops and frameworks see it: a DataLoader that tunes itself while it trains."""

from __future__ import annotations

import inspect
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.live.arguments import asked_for
from autotune_loader.live.budgets import Budgets
from autotune_loader.live.epoch import EpochIterator
from autotune_loader.live.order import Order, Source, drawn_again, restore_own, settle, states_of
from autotune_loader.live.pool import Parts
from autotune_loader.live.prospects import Job
from autotune_loader.live.rebuilt import forget, keep, left_by_another
from autotune_loader.live.saved import SCHEMA_VERSION, check_saved
from autotune_loader.live.seeds import LoopSeeds, draws_nothing, mixed
from autotune_loader.live.state import LoaderState, depends_on_worker
from autotune_loader.live.step_threads import StepThreads
from autotune_loader.live.traces import LiveTraces
from autotune_loader.live.trust import Trust
from autotune_loader.live.tuner import Event
from autotune_loader.live.tuning import LiveTuning, cores_within, first_proposal, history_frame
from autotune_loader.pipeline.site import Site
from autotune_loader.pipeline.stages import pooled, stage_times
from autotune_loader.pipeline.workload import length_of
from autotune_loader.results.file import load_config
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import users_line
from autotune_loader.values.validation import parse_bytes, require_bool, require_choice

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
MOST_REPORTS = 2000
"""Of what watched workers are at: with ten a second from each, the latest minutes."""


class AutoLoader(DataLoader[T], Generic[T]):
    """A DataLoader that tunes its workers and prefetching while it trains, and delivers what a plain one would.

    It begins as its arguments say: `num_workers`, 0 where it is not given, start method, `persistent_workers`. Training itself
    is measured, batch by batch. Where the loop waits for data, other numbers of workers are tried in its midst, for at most
    1 % of the time trained (2 s more to begin with); what turns out slower is taken back. Then it is silent, until the rate
    shifts for good. Where no workers were asked for, none are started before a helper process has shown that they make the
    same batches; where they do not, nothing is tried, and `report()` says why.

    Order, number of batches and the global random state afterwards are those of `DataLoader` with the same arguments,
    whatever was changed in between; each batch's random numbers come from (seed of the epoch, number of the batch), so that
    augmentations do not depend on the number of workers. With 0 workers, too, the dataset does not draw from the training's
    own generators, but where another thread fetches than the one that made the loader. `random` and numpy are then looked
    after only where the dataset is seen to draw from them, in the first batches or in every 128th.

    Lost workers are replaced and their batches fetched again. An IterableDataset is only watched, as its samples depend on
    its workers; `change_to` changes it between epochs, and the loss of one of its workers raises torch's error.

    Args:
        dataset: as for DataLoader, or a DataLoader, which is only read.
        *args: as for DataLoader.
        config: a configuration or a `loader.json` in place of `num_workers`, `prefetch_factor`, `pin_memory`, `in_order`,
            `persistent_workers` and start method.
        worker_seeds: "batch" seeds by batch; "torch" by worker, as DataLoader does.
        tune: False only watches: `report()` says what the bottleneck is.
        stages: clock in the workers where a sample's time goes, at about 1 % of their time, so that `report()` tells.
        step_threads: "auto" tries fewer intra-op threads for a step on the CPU, too, which then has the cores that its workers
            leave it. They are the whole process' (`torch.set_num_threads`), and sums may round otherwise. None leaves them.
        on_change: called with an `Event` whenever the loader has settled on a configuration, for a logger. A line says so in
            the log at INFO.
        max_workers: most worker processes at any time.
        max_cores: cores that may be counted on.
        max_host_memory: most memory of workers and the batches they hold, in bytes or such as "8GB".
        max_shm: most shared memory that batches take, such as "1GiB".
        **arguments: as for DataLoader.

    Raises:
        TypeError: an argument that DataLoader does not have.
        ValueError: as DataLoader; a configuration above a budget.
    """

    def __init__(  # noqa: PLR0913 - the options of AutoLoader
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
        max_host_memory: str | int | None = None,
        max_shm: str | int | None = None,
        **arguments: Any,
    ) -> None:
        require_choice("worker_seeds", worker_seeds, ("batch", "torch"))
        if step_threads is not None:
            require_choice("step_threads", step_threads, ("auto",))
        for name, value in (("tune", tune), ("stages", stages)):
            require_bool(name, value)
        if config is not None and not isinstance(config, LoaderConfig):
            config = load_config(config)
        super().__init__(**asked_for(dataset, args, arguments, config, own=inspect.signature(AutoLoader).parameters))
        # Public attributes are arguments: who makes a loader anew from another's (Lightning, Accelerate) gets the same one.
        self.worker_seeds, self.tune, self.stages, self.step_threads = worker_seeds, tune, stages, step_threads
        self.max_workers, self.max_cores, self.on_change = max_workers, max_cores, on_change
        self.max_host_memory = parse_bytes("max_host_memory", max_host_memory)
        self.max_shm = parse_bytes("max_shm", max_shm)
        self._config: LoaderConfig | None = None  # it is in `num_workers` and its like
        self._seed: int | None = None
        self._epochs = 0
        self._saved: Mapping[str, Any] | None = None
        self._order: Order | None = None
        self._line = users_line(sys._getframe(1), libraries=True)
        self._begin_anew(None if config is None else config.consumer_threads)
        self._check(self._state.asked if config is None else config)

    def _begin_anew(self, threads: int | None) -> None:
        """Nothing is known of what the loader reads, and how: it is new, or attributes of it were set."""
        is_seeded = self.worker_seeds == "batch" and not draws_nothing(self.dataset, self.collate_fn)
        self._loop_seeds = LoopSeeds() if is_seeded else None
        self._tuning: LiveTuning | None = None
        self._trust: Trust | None = None
        self._of: tuple[Any, ...] = ()
        self._state = self._fresh_state(threads)
        self._site = Site.of(self, self._line)
        state, how = self._state, (self.stages, self.step_threads, self.max_cores)
        self._made_at: Hashable = (self._site, state.asked, state.budgets, *how) if self.tune else None

    def _see_what_is_new(self) -> None:
        """Torch lets everybody set `num_workers`, `collate_fn` and others, and by a trick the dataset: another loader, then."""
        of = self.dataset, self.collate_fn, self.worker_init_fn, self._index_sampler
        threads = self._state.asked.consumer_threads
        is_same = all(mine is its for mine, its in zip(self._of or of, of, strict=True))
        if not is_same or replace(LoaderConfig.from_loader(self), consumer_threads=threads) != self._state.asked:
            self._begin_anew(threads)
        self._of = of

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

    @property
    def best(self) -> LoaderConfig:
        """The best configuration that is known; while something is tried, that may be another one than `config`."""
        return self.config if self._tuning is None else self._tuning.tuner.best

    @property
    def history(self) -> pd.DataFrame:
        """What was observed and decided, one row each: seconds trained, batch, configuration, samples/s, share of waiting."""
        return history_frame([] if self._tuning is None else self._tuning.tuner.history)

    def report(self) -> str:
        """What was tried, what was found and what limits the rate, as text; and why nothing was tried, where that is so."""
        return self._result().report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json` with the best configuration known: the next job begins where this one ended."""
        self._result().save(path)

    def go_on_from(self, state: LoaderState, tuning: LiveTuning) -> None:
        """Take over what another loader learnt that did the same work, as where a script makes a loader for each epoch.

        Args:
            state: of the other loader, which is not iterated any more.
            tuning: of the other loader.
        """
        self._state, self._tuning = state, tuning
        tuning.on_change = self.on_change

    @property
    def learnt(self) -> tuple[LoaderState, LiveTuning]:
        """What `go_on_from` takes over."""
        return self._state, self._known()

    def _result(self) -> TuningResult:
        stages = self._state.stages
        return self._known().result(
            site=self._site,
            has_batched_fetch=hasattr(self.dataset, "__getitems__"),
            stage_times=() if stages is None else stage_times(pooled(stages)),
        )

    def freeze(self) -> None:
        """Try and change nothing any more."""
        self.tune = self._state.is_tuned = False
        forget(self._made_at)
        self._made_at = None
        self._state.wake = math.inf

    def change_to(self, config: LoaderConfig) -> None:
        """Go on with another configuration, in the midst of the epoch where the dataset has indices; it is not tuned further.

        Args:
            config: what to change to. Order, batch size, dropping of the last batch and the life of workers stay as they are.

        Raises:
            ValueError: a budget is exceeded, or the configuration has another batch size or `drop_last`.
        """
        self._check(config)
        self.freeze()
        if config.num_workers:
            config = replace(config, in_order=self.in_order, persistent_workers=self.persistent_workers)
        self._state.change_to(config)

    def _get_iterator(self) -> Any:
        """As torch's, which `iter(loader)` calls for each epoch; with persistent workers once."""
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return super()._get_iterator()  # they carry a configuration of their own into the workers
        if self.timeout and not self.num_workers:
            return super()._get_iterator()  # raises
        self.check_worker_number_rationality()
        parts, order = self._next_epoch()
        iterator = EpochIterator(self, self._state, parts, order, self._trust)
        if self._made_at is not None:
            keep(self._made_at, self.learnt, self, iterator)
        return iterator

    def _next_epoch(self) -> tuple[Parts, Order]:
        order = self._order = self._next_order()
        self._known()
        order.workers = self.config.num_workers
        self._epochs += 1
        return self._parts(), order

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a loader that is sent to another process, has no epoch running; as torch's iterators are not sent."""
        asked = self._state.asked
        fresh = {**dict.fromkeys(("_iterator", "_order", "_tuning", "_trust", "_made_at")), "_of": ()}
        state = replace(self._fresh_state(asked.consumer_threads), config=self._state.config)
        return {
            **self.__dict__,
            **fresh,
            "_state": state if self._state.proof is None else replace(state, config=asked),
        }

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
                "workers": order.workers,
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
        fetched once more and dropped, with as many workers as then. What was learnt is tried first.

        Raises:
            ValueError: the state is of another dataset or batch size, or of an IterableDataset with another number of workers.
        """
        workers = self.config.num_workers if isinstance(self.dataset, IterableDataset) else None
        check_saved(state, samples=length_of(self.dataset), batch_size=self.batch_size, workers=workers)
        forget(self._made_at)
        self._saved, self._iterator, self._order, self._made_at = state, None, None, None
        self._epochs, self._seed = state["epochs"], state["seed"]

    def _next_order(self) -> Order:
        source, saved = _source_of(self), self._saved
        if self._order is not None and not isinstance(self.dataset, IterableDataset):
            settle(self._order)
        if saved is not None and saved["epoch"] is not None:
            self._saved = {**saved, "epoch": None, "own": None}
            self._epochs -= 1
            return drawn_again(source, saved["epoch"])
        if saved is not None and saved["own"] is not None:
            self._saved = {**saved, "own": None}
            restore_own(source, saved["own"])
        if self._seed is not None and self.persistent_workers:
            # Torch draws a seed for the workers once, when it starts them.
            return Order(source, seed=mixed(self._seed, self._epochs) >> 1)
        order = Order(source)
        self._seed = order.seed
        return order

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
            context=self.multiprocessing_context,
            stages=self.stages,
            is_asked=self.num_workers > 0,
            loop_seeds=self._loop_seeds,
        )

    def _fresh_state(self, threads: int | None) -> LoaderState:
        asked = replace(LoaderConfig.from_loader(self), consumer_threads=threads)
        return LoaderState(
            asked=asked,
            config=asked,
            budgets=Budgets(max_workers=self.max_workers, max_host_memory=self.max_host_memory, max_shm=self.max_shm),
            stages=deque(maxlen=MOST_REPORTS) if self.stages else None,
            threads=StepThreads(cores_within(self.max_cores)) if self.step_threads else None,
            is_tuned=self.tune and not isinstance(self.dataset, IterableDataset) and not current_process().daemon,
        )

    def _known(self) -> LiveTuning:
        """The tuner, from the first epoch on; the one of the loader before where this one takes its place."""
        if self._iterator is None:  # else its workers are kept
            self._see_what_is_new()
        if self._tuning is None and (left := left_by_another(self._made_at)) is not None:
            self.go_on_from(*left)
        state = self._state
        if self._trust is None and state.is_tuned:
            self._trust = Trust(self._parts(), state.asked, self._index_sampler)
            state.proof, state.refusal = weakref.ref(self._trust), None
            if (refusal := depends_on_worker(self.worker_init_fn)) is not None:
                state.refuse(refusal)
        if self._tuning is None:
            self._tuning = self._begun()
        return self._tuning

    def _begun(self) -> LiveTuning:
        first = first_proposal(self, self._saved) if self._state.is_tuned else None
        job = Job(
            start=self._state.asked,
            first=first,
            usable_cores=cores_within(self.max_cores),
            max_workers=self.max_workers,
            epoch_batches=length_of(self),
            step_threads=(None,) if self._state.threads is None else self._state.threads.counts,
            is_fixed=not self._state.is_tuned,
            site=self._site.key,
        )
        return LiveTuning(self._state, job, on_change=self.on_change)

    def _check(self, config: LoaderConfig) -> None:
        """Raise a ValueError where a configuration is not this loader's to take."""
        if config.batch_size not in (None, self.batch_size):
            raise ValueError(
                f"batch_size={config.batch_size} of the configuration is not that of the loader ({self.batch_size}), which "
                f"does not change; batch_size={self.batch_size} would work"
            )
        if config.drop_last not in (None, self.drop_last):
            raise ValueError(
                f"drop_last={config.drop_last} of the configuration is not that of the loader; drop_last=None would work"
            )
        self._state.budgets.refuse(config, self._state.shape)


def _source_of(loader: AutoLoader[Any]) -> Source:
    ahead = 0 if isinstance(loader.dataset, IterableDataset) else loader.num_workers * (loader.prefetch_factor or 0)
    return Source(sampler=loader._index_sampler, generator=loader.generator, workers=loader.num_workers, ahead=ahead)
