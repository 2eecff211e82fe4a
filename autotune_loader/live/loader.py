"""`AutoLoader`, as training loops and frameworks see it: a DataLoader whose configuration may change at any time."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autotune_loader.live.arguments import NEEDS_WORKERS, asked_for
from autotune_loader.live.budgets import Budgets
from autotune_loader.live.epoch import EpochIterator, LoaderState
from autotune_loader.live.order import Order, Source, drawn_again, restore_own, settle, states_of
from autotune_loader.live.pool import Parts, refuse_children_of_daemons
from autotune_loader.live.saved import SCHEMA_VERSION, check_saved
from autotune_loader.live.seeds import LoopSeeds, mixed
from autotune_loader.live.traces import LiveTraces
from autotune_loader.results.load import load_config
from autotune_loader.values.config import LoaderConfig

T = TypeVar("T")


class AutoLoader(DataLoader[T], Generic[T]):
    """A DataLoader that can change its workers in the midst of an epoch and still delivers what a plain one would.

    Order, number of batches and the global random state afterwards are those of `DataLoader` with the same arguments,
    whatever was changed in between; each batch's random numbers come from (seed of the epoch, number of the batch), so that
    augmentations do not depend on the number of workers. With 0 workers `random` and numpy are looked after only where the
    dataset is seen to draw from them, in the first batches or in every 128th.

    Lost workers are replaced and their batches fetched again. An IterableDataset changes between epochs only, and the loss
    of one of its workers raises torch's error.

    Args:
        dataset: as for DataLoader, or a DataLoader, which is only read.
        *args: as for DataLoader.
        config: what to start with: a configuration or a `loader.json`. It wins over `num_workers`, `prefetch_factor` and
            `pin_memory`; the order never depends on it.
        worker_seeds: "batch" seeds by batch; "torch" by worker, as DataLoader does.
        max_workers: most worker processes at any time.
        max_host_memory: most bytes of workers and the batches they hold.
        max_shm: most bytes of shared memory that batches take.
        **arguments: as for DataLoader; `num_workers` is where it starts.

    Raises:
        TypeError: an argument that DataLoader does not have.
        ValueError: as DataLoader; a configuration above a budget; workers in a process that may not have children.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        config: LoaderConfig | str | os.PathLike[str] | None = None,
        worker_seeds: Literal["batch", "torch"] = "batch",
        max_workers: int | None = None,
        max_host_memory: int | None = None,
        max_shm: int | None = None,
        **arguments: Any,
    ) -> None:
        if worker_seeds not in ("batch", "torch"):
            raise ValueError(
                f"worker_seeds={worker_seeds!r} is not 'batch' or 'torch'; worker_seeds='batch' would work"
            )
        asked = asked_for(dataset, args, arguments)
        self._wished_context = asked.get("multiprocessing_context")
        if not asked.get("num_workers"):
            asked = {name: value for name, value in asked.items() if name not in NEEDS_WORKERS}
        super().__init__(**asked)
        self.worker_seeds, self.max_workers = worker_seeds, max_workers
        self.max_host_memory, self.max_shm = max_host_memory, max_shm
        self._loop_seeds = LoopSeeds() if worker_seeds == "batch" else None
        self._seed: int | None = None
        self._epochs = 0
        self._saved: Mapping[str, Any] | None = None
        self._kept: EpochIterator | None = None
        self._latest: weakref.ref[EpochIterator] | None = None
        self._order: Order | None = None
        self._workers_of_epoch = 0
        budgets = Budgets(max_workers=max_workers, max_host_memory=max_host_memory, max_shm=max_shm)
        self._state = LoaderState(config=LoaderConfig(), budgets=budgets)
        self._state.config = self._allowed(self._start(config))

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

    def change_to(self, config: LoaderConfig) -> None:
        """Go on with another configuration, in the midst of the epoch where the dataset has indices.

        Args:
            config: what to change to. Order of delivery, batch size and dropping of the last batch stay as they are.

        Raises:
            ValueError: as the constructor; or the configuration has another batch size or `drop_last`.
        """
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
        iterator = self._kept if self.config.persistent_workers else None
        if iterator is None:
            self._kept, iterator = None, EpochIterator(self._state)
        if self.config.persistent_workers:
            self._kept = iterator  # as torch: whoever iterates again gets the same iterator, started over
        self._latest, self._order = weakref.ref(iterator), order
        self._workers_of_epoch = self.config.num_workers
        iterator.begin(self._parts(), order)
        for _ in range(skipped):
            next(iterator)
        self._epochs += 1
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a loader that is sent to another process, has no epoch running; as torch's iterators are not sent."""
        return {**self.__dict__, "_latest": None, "_kept": None, "_order": None}

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, for `load_state_dict` of another one with the same dataset and arguments.

        In mid-epoch, also after `break`, batches count as had once the loop has received them. Nothing is fetched; it may be
        called at any time.
        """
        source, order, epoch = self._source(), self._order, None
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
            "samples": self._samples(),
            "batch_size": self.batch_size,
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
        workers = self.config.num_workers if self._is_stream else None
        check_saved(state, samples=self._samples(), batch_size=self.batch_size, workers=workers)
        self._saved, self._kept, self._latest, self._order = state, None, None, None
        self._epochs, self._seed = state["epochs"], state["seed"]

    def _next_order(self) -> tuple[Order, int]:
        """The order of the next epoch, and how many batches of a stream are to be passed over."""
        source, saved = self._source(), self._saved
        self._saved = None
        if self._order is not None and not self._is_stream:
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

    def _source(self) -> Source:
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        ahead = 0 if self._is_stream else self.num_workers * (self.prefetch_factor or 0)
        return Source(sampler=sampler, generator=self.generator, workers=self.num_workers, ahead=ahead)

    def _parts(self) -> Parts:
        return Parts(
            dataset=self.dataset,
            is_stream=self._is_stream,
            batched=self.batch_sampler is not None,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            collate_fn=self.collate_fn,
            worker_init_fn=self.worker_init_fn,
            timeout=self.timeout,
            context=self._wished_context,
            loop_seeds=self._loop_seeds,
        )

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def _samples(self) -> int | None:
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

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
        has_epochs = hasattr(self.dataset, "set_epoch") or hasattr(self.dataset, "epoch")
        # Kept workers never hear of the dataset's new epoch, unless the user wants it so.
        keeps = config.persistent_workers and (self.persistent_workers or not has_epochs)
        return replace(config, in_order=self.in_order, persistent_workers=keeps)
