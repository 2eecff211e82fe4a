"""`AutoLoader`, as training loops and frameworks see it: a DataLoader that finds its number of workers while it trains."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from autotune_loader.autoloader.live import Found, Live, iterator_of, live_of
from autotune_loader.lines import users_line
from autotune_loader.machine.limits import require_linux
from autotune_loader.pipeline.build import batching_of
from autotune_loader.results.file import load_config
from autotune_loader.values import WITHOUT_WORKERS, LoaderConfig, require_bool, require_int

require_linux("AutoLoader")

T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
GIVEN = "_autotune_loader_given"
"""Attribute of an AutoLoader: the names of the arguments that were given."""
OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""What says how workers are, if there are any; torch refuses most of it without."""
CONFIGURED = ("num_workers", "pin_memory", *WITHOUT_WORKERS)
"""Arguments that a configuration takes the place of."""
OWN = ("config", "tune", "on_change", "max_workers", "workers", "fetch_threads")
"""What AutoLoader takes beyond the arguments of DataLoader."""


class _Told:
    """An attribute that is read from elsewhere; a subclass may have one of its own by that name."""

    def __init__(self, path: str, doc: str) -> None:
        self._read, self.__doc__ = attrgetter(path), doc

    def __get__(self, loader: Any, kind: Any = None) -> Any:
        return self if loader is None else self._read(loader)


def _noting_what_is_given(init: Callable[P, None]) -> Callable[P, None]:
    """`__init__` that notes which of its arguments were given; of others it says which one may be meant."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(*args: P.args, **arguments: P.kwargs) -> None:
        for name in arguments.keys() - signature.parameters.keys():
            near = difflib.get_close_matches(name, signature.parameters, n=1) or ["num_workers"]
            wrong = f"{name}={arguments[name]!r} is an argument of neither AutoLoader nor DataLoader"
            raise TypeError(f"{wrong}; {near[0]} would work")
        vars(args[0])[GIVEN] = signature.bind(*args, **arguments).arguments.keys() - {"self"}
        init(*args, **arguments)

    return checked


class AutoLoader(DataLoader[T_co]):
    """A DataLoader that finds its number of workers during training.

    It returns the batches of `DataLoader` with the same arguments: the same indices in the same order, each once. Its
    workers are PyTorch's: they see the dataset as it was when they started, and live as long as DataLoader's. Use it
    wherever `num_workers=2` would work. `num_workers=0`, written out, means none.

    If the training loop waits for data, other numbers of workers are tried for parts of a second; only what is
    significantly faster is kept. The random numbers of a batch are seeded by epoch and batch, so augmentations do not
    depend on the number of workers. Batches are written to memory that worker and training process share; neither
    /dev/shm nor TMPDIR is used.

    Args:
        dataset: As in `DataLoader`, or a DataLoader, which does not change.
        batch_size, shuffle, sampler, batch_sampler, collate_fn, pin_memory, drop_last, worker_init_fn, generator,
            pin_memory_device, in_order: As in `DataLoader`.
        num_workers: Number of workers at the start. `None` (default) starts without workers and tries some if the loop
            waits. 0 uses none. 1 keeps one worker, which loads all batches in order. From 2 on the number may change,
            but not to 0.
        timeout, multiprocessing_context, prefetch_factor, persistent_workers: As in `DataLoader`. Without `num_workers`
            they apply as soon as there are workers.
        config: Settings or a `loader.json` in place of `num_workers`, `prefetch_factor`, `pin_memory`, `in_order`,
            `persistent_workers` and start method.
        tune: `False` keeps the number of workers.
        on_change: Called with `loader.found` whenever another setting is best, such as for a logger.
        max_workers: Most worker processes at any time.
        workers: Whether workers may be used. `None`: unless `num_workers=0` is written out.
        fetch_threads: Load the samples of a batch by this many threads in each worker, if the dataset has no
            `__getitems__`. The dataset must be thread-safe, and draw no random numbers.

    Raises:
        TypeError: An argument has the wrong type; or the loader has its own iterator, which would not run.
        ValueError: As in `DataLoader`.
    """

    @_noting_what_is_given
    def __init__(
        self,
        dataset: Dataset[T_co] | DataLoader[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        config: LoaderConfig | str | os.PathLike[str] | None = None,
        tune: bool = True,
        on_change: Callable[[Found], None] | None = None,
        max_workers: int | None = None,
        workers: bool | None = None,
        fetch_threads: int | None = None,
    ) -> None:
        values = locals()
        given = {
            name: values[name] for name in vars(self).pop(GIVEN) if values[name] is not None or name == "batch_size"
        }
        require_bool("tune", tune)
        for name, value in (("max_workers", max_workers), ("fetch_threads", fetch_threads)):
            require_int(name, value, minimum=1, or_none=True)
        arguments = {name: value for name, value in given.items() if name not in OWN}
        if isinstance(dataset, DataLoader):
            arguments = {**_arguments_of(dataset, arguments), **arguments, "dataset": dataset.dataset}
        if config is not None:
            config = config if isinstance(config, LoaderConfig) else load_config(config)
            arguments = {name: value for name, value in arguments.items() if name not in CONFIGURED}
            arguments |= {name: value for name, value in config.arguments().items() if name in CONFIGURED}
        may, how = workers, dict[str, Any]()
        if not arguments.get("num_workers"):
            may = "num_workers" not in arguments if workers is None else workers
            how = {name: arguments.pop(name) for name in OF_WORKERS if may and arguments.get(name)}
        elif workers is False:
            raise ValueError(
                f"workers=False and num_workers={arguments['num_workers']} contradict; num_workers=0 would work"
            )
        if fetch_threads is not None and not (arguments.get("num_workers") or may):
            raise ValueError(f"fetch_threads={fetch_threads} needs worker processes; num_workers=2 would work")
        super().__init__(**arguments)
        # Public attributes are arguments: who makes a loader anew from another's (Lightning, Accelerate) gets the same one.
        self.tune, self.on_change, self.max_workers, self.fetch_threads = tune, on_change, max_workers, fetch_threads
        self.workers = True if may is None else may
        self._how, self._line = how, users_line(sys._getframe(2), libraries=True)
        self._since: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)

    @property
    def _live(self) -> Live:
        options = ("tune", "on_change", "max_workers", "workers", "fetch_threads")
        live = live_of(self, self._line, how=self._how, **{name: getattr(self, name) for name in options})
        live.found.log.marks.settle(time.monotonic())
        return live

    found = _Told("_live.found", "What is known; it lives on without loader and data.")
    config = _Told("_live.found.config", "What runs from the next batch on.")
    best = _Told("_live.found.best", "The best configuration that is known.")
    kept = _Told("_live.found.kept", "Why the number of workers stays; None where it does not.")
    log = _Told("_live.found.log", "Every batch's history.")
    result = _Told("_live.found.result", "What was tried and found, as `tune()` returns it.")

    def __str__(self) -> str:
        return str(self._live.found.result)

    def report(self) -> str:
        """What was tried, what was found and what limits training, as text; or why nothing was tried."""
        return self._live.found.result.report()

    def metrics(self) -> dict[str, float]:
        """Figures since the last call, for any logger, without those that were not measured.

        Returns:
            `data_time`: Seconds per step that the loop waited for its batch. `data_wait_share`: Share of the time, from
            0 to 1. `samples_per_sec`. `num_workers`: The current number.
        """
        totals = self._live.found.log.totals
        now = (float(totals.batches), float(totals.samples), totals.waited_s, totals.active_s)
        batches, samples, waited_s, active_s = (each - before for each, before in zip(now, self._since, strict=True))
        self._since, figures = now, {"num_workers": float(self.num_workers)}
        if batches and active_s > 0:
            figures |= {"data_time": waited_s / batches, "data_wait_share": waited_s / active_s}
            figures["samples_per_sec"] = samples / active_s
        return figures

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json` with the best known setting: `AutoLoader(..., config=path)` starts with it."""
        self._live.found.result.save(path)

    def freeze(self) -> None:
        """Stop tuning."""
        self.tune = False
        self._live.tuner.freeze()

    def _get_iterator(self) -> Any:
        return iterator_of(self, self._live, super()._get_iterator)


def _arguments_of(loader: DataLoader[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those that a loader was made with; of workers nothing where torch refuses or ignores it, as there are none."""
    kind, name = type(loader), type(loader).__name__
    library = kind.__module__.partition(".")[0]
    if library == "accelerate":
        raise TypeError(
            f"AutoLoader({name}(...)) would leave out what Accelerate does to a batch; accelerator.prepare(AutoLoader(...)) "
            "would work"
        )
    if kind.__iter__ is not DataLoader.__iter__ and library != "torchdata":
        raise TypeError(
            f"{name} has its own iterator, which AutoLoader({name}(...)) would not run; "
            f"AutoLoader as the base class of {name}, in place of DataLoader, would work"
        )
    names: tuple[str, ...] = ("num_workers", "pin_memory", "collate_fn", "timeout", "worker_init_fn", "generator")
    if given.get("num_workers", loader.num_workers) and loader.num_workers:
        names += tuple(WITHOUT_WORKERS)
    return batching_of(loader, LoaderConfig()) | {name: getattr(loader, name) for name in names}
