"""`AutoLoader`, as training loops and frameworks see it: a DataLoader that finds its number of workers while it trains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from autotune_loader.autoloader.births import begin_root
from autotune_loader.autoloader.live import UNASKED, Found, Live, Told, iterator_of, live_of
from autotune_loader.autoloader.torchs import LoaderOf
from autotune_loader.autoloader.tuner import Frozen
from autotune_loader.autoloader.worker import require_items
from autotune_loader.diagnosis import Finding
from autotune_loader.lines import users_line
from autotune_loader.machine.limits import require_linux
from autotune_loader.pipeline.build import batching_of
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.results.file import fitted_settings
from autotune_loader.results.result import TuningResult
from autotune_loader.values import WITHOUT_WORKERS, LoaderConfig, require_bool, require_int
from autotune_loader.values.units import counted

require_linux("AutoLoader")

T_co = TypeVar("T_co", covariant=True)
Value = TypeVar("Value")
OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""What says how workers are, if there are any; torch refuses most of it without."""
CONFIGURED = ("num_workers", "pin_memory", *WITHOUT_WORKERS)
"""Arguments that a configuration takes the place of."""


class Attribute(Generic[Value]):
    """What is read from elsewhere; a subclass may have an attribute of its own by that name, which a property forbids."""

    def __init__(self, path: str) -> None:
        self._read: Callable[[Any], Any] = attrgetter(path)

    @overload
    def __get__(self, loader: None, kind: Any = None) -> Attribute[Value]: ...
    @overload
    def __get__(self, loader: object, kind: Any = None) -> Value: ...
    def __get__(self, loader: Any, kind: Any = None) -> Attribute[Value] | Value:
        """Read it; of the class, the descriptor itself."""
        value: Attribute[Value] | Value = self if loader is None else self._read(loader)
        return value


class AutoLoader(LoaderOf[T_co]):
    """A DataLoader that finds its number of workers while it trains.

    It gives the samples that `DataLoader` gives with the same arguments: the same indices in the same order, each once.
    Random augmentations are seeded per batch, so that they do not depend on the number of workers. Its workers are
    PyTorch's: they see the dataset as it was at `iter()`, live as long as DataLoader's do, and whatever they do besides
    samples they do as there. Use it wherever `num_workers=2` would work. `num_workers=0`, written out, means none.

    If the training loop waits for data, the rate of other numbers of workers is predicted from what was measured, and the
    best of them runs; it is kept if it is as fast as predicted, or significantly faster in A/B rounds. Where `num_workers` is
    left out, workers take over only after two of their batches were equal to those of the training process. Where the number
    may change, a batch goes to the worker that is free, and one that is much too late to a second worker, too. Batches are
    written to memory that worker and training process share; neither /dev/shm nor TMPDIR is used.

    Args:
        dataset: As in `DataLoader`, or a DataLoader, which does not change: what is not given is taken from it.
        batch_size, shuffle, sampler, batch_sampler, collate_fn, pin_memory, drop_last: As in `DataLoader`.
        worker_init_fn, generator, pin_memory_device, in_order: As in `DataLoader`.
        num_workers: Number of workers at the start. `None` (default) starts without workers and tries some if the loop
            waits. 0 uses none. 1 keeps one worker, which loads all batches in order. From 2 on the number may change,
            but not to 0.
        timeout, multiprocessing_context, prefetch_factor, persistent_workers: As in `DataLoader`. Without `num_workers`
            they apply as soon as there are workers.
        config: Settings or a `loader.json` in place of `num_workers`, `prefetch_factor`, `pin_memory`, `in_order`,
            `persistent_workers` and start method.
        tune: `False` keeps the number of workers.
        on_change: Called with `loader.found` whenever another setting is best, such as for a logger.
        max_workers: Most worker processes at any time. Default: 64, the number of cores, or `num_workers`, whichever is
            largest.
        fetch_threads: Load the samples of a batch by this many threads in each worker. The dataset must be thread-safe,
            and draw no random numbers.

    Raises:
        TypeError: An argument has the wrong type; or the loader has its own iterator, which would not run.
        ValueError: As in `DataLoader`; or `fetch_threads` without workers, for a stream, or for a dataset that fetches a
            batch at once.
    """

    def __init__(
        self,
        dataset: Dataset[T_co] | DataLoader[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool | None = None,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory_device: str | None = None,
        in_order: bool | None = None,
        config: LoaderConfig | str | os.PathLike[str] | None = None,
        tune: bool = True,
        on_change: Callable[[Found], None] | None = None,
        max_workers: int | None = None,
        fetch_threads: int | None = None,
    ) -> None:
        require_bool("tune", tune)
        for name, value in (("max_workers", max_workers), ("fetch_threads", fetch_threads)):
            require_int(name, value, minimum=1, or_none=True)
        all_of_them: dict[str, Any] = {
            "shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler, "num_workers": num_workers,
            "collate_fn": collate_fn, "pin_memory": pin_memory, "drop_last": drop_last, "timeout": timeout,
            "worker_init_fn": worker_init_fn, "multiprocessing_context": multiprocessing_context, "generator": generator,
            "prefetch_factor": prefetch_factor, "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device, "in_order": in_order,
        }  # fmt: skip
        arguments = {name: value for name, value in all_of_them.items() if value is not None}
        if batch_size != 1:
            arguments["batch_size"] = batch_size
        if isinstance(dataset, DataLoader):
            arguments = {**_arguments_of(dataset, arguments), **arguments}
            dataset = dataset.dataset
        if config is not None:
            config = config if isinstance(config, LoaderConfig) else fitted_settings(config)[0]
            arguments = {name: value for name, value in arguments.items() if name not in CONFIGURED}
            arguments |= {name: value for name, value in config.to_kwargs().items() if name in CONFIGURED}
        # Public attributes are arguments: who makes a loader anew from another's (Lightning, Accelerate) gets the same one.
        self.tune: bool = tune
        self.on_change: Callable[[Found], None] | None = on_change
        self.max_workers: int | None = max_workers
        self.fetch_threads: int | None = fetch_threads
        self._how = dict[str, Any]()
        if _is_unasked(arguments.setdefault("num_workers", UNASKED)):
            arguments["num_workers"] = UNASKED
            self._how = {name: arguments.pop(name) for name in OF_WORKERS if arguments.get(name)}
        if fetch_threads is not None:
            if arguments["num_workers"] == 0 and not _is_unasked(arguments["num_workers"]):
                raise ValueError(f"fetch_threads={fetch_threads} needs worker processes. Try num_workers=2.")
            require_items(dataset, fetch_threads)
        super().__init__(dataset, **arguments)
        self._line = users_line(sys._getframe(1), libraries=True)
        begin_root(self)

    def _known(self) -> Live:
        options = {name: getattr(self, name) for name in ("tune", "on_change", "max_workers", "fetch_threads")}
        return live_of(self, self._line, allow_workers=_is_unasked(self.num_workers), how=self._how, **options)

    @property
    def _live(self) -> Live:
        live = self._known()
        live.found.log.marks.settle(time.monotonic())
        return live

    found: Attribute[Found] = Attribute("_live.found")
    """What is known so far. It holds neither the loader nor its data, and outlives them."""
    config: Attribute[LoaderConfig] = Attribute("_live.found.config")
    """The settings of the next batch."""
    best: Attribute[LoaderConfig] = Attribute("_live.found.best")
    """The best settings so far."""
    kept: Attribute[Finding | None] = Attribute("_live.found.kept")
    """Why the number of workers does not change; None if it does."""
    log: Attribute[Log] = Attribute("_live.found.log")
    """The history of each batch."""
    result: Attribute[TuningResult] = Attribute("_live.found.result")
    """What was tried and found, as from `tune()`."""

    def __repr__(self) -> str:
        tuning = ", tuning" if self._known().tuner.refused is None else ""
        workers = counted(self.num_workers, "worker")
        return f"{type(self).__name__}({type(self.dataset).__name__}, {workers}{tuning})"

    def __str__(self) -> str:
        return str(self._live.found.result)

    def report(self) -> str:
        """What was tried, what was found and what limits training, as text; or why nothing was tried."""
        return self._live.found.result.report()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return figures since the last call, for any logger. If there was no batch, only `num_workers` is known.

        Args:
            prefix: Put before each name, such as "loader/".

        Returns:
            `num_workers`: The current number. `wait_s`: Seconds that the training loop waited for a batch, on average.
            `wait_share`: Share of the time in which it waited, 0 to 1. `samples_per_s`.
        """
        return {f"{prefix}num_workers": float(self.num_workers), **self._known().found.log.recent(prefix)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json` with the best known setting: `AutoLoader(..., config=path)` starts with it."""
        self._live.found.result.save(path)

    def freeze(self) -> None:
        """Stop tuning."""
        self.tune = False
        self._live.tuner.decide(Frozen(), time.monotonic())

    def _get_iterator(self) -> Any:
        return iterator_of(self, self._known(), super()._get_iterator)


def _is_unasked(workers: int) -> bool:
    return isinstance(workers, Told) and not workers.asked


def _arguments_of(loader: DataLoader[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those that a loader was made with; of workers nothing where torch refuses or ignores it, as there are none."""
    kind, name = type(loader), type(loader).__name__
    if kind.__module__.partition(".")[0] == "accelerate":
        raise TypeError(
            f"AutoLoader({name}(...)) would leave out what Accelerate does to a batch. Try "
            "accelerator.prepare(AutoLoader(...))."
        )
    if hasattr(loader, "state_dict"):
        raise TypeError(
            f"{name} has a state_dict(), which AutoLoader({name}(...)) would not have. Try "
            "tune(loader).apply_to(loader)."
        )
    if kind.__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{name} has its own iterator, which AutoLoader({name}(...)) would not run. "
            f"Try AutoLoader as the base class of {name}, in place of DataLoader."
        )
    names: tuple[str, ...] = ("pin_memory", "collate_fn", "timeout", "worker_init_fn", "generator")
    if given.get("num_workers", loader.num_workers) and loader.num_workers:
        names += ("num_workers", *WITHOUT_WORKERS)  # 0 is what it has where nobody said anything
    return batching_of(loader, LoaderConfig()) | {name: getattr(loader, name) for name in names}
