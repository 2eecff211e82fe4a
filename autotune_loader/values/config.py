"""One DataLoader configuration as a value, and the checks of its fields and of other arguments.

Torch is not imported, so that a `loader.json` can be read on a machine without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

_Loader = TypeVar("_Loader")
ALLOWABLE = ("batch_size", "in_order", "persistent_workers", "device_prefetch")
"""What `allow=` may name: these change training, or take memory of the device, and are searched only if allowed."""
TORCH_PREFETCH_FACTOR = 2  # DataLoader's default where there are workers
START_METHODS = ("fork", "forkserver", "spawn")  # as multiprocessing names them
WITHOUT_WORKERS: dict[str, Any] = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "in_order": True,
    "multiprocessing_context": None,
}
"""What only workers have, as it has to be where there are none."""
# A file may come from anywhere, and DataLoader starts as many processes as it says.
_MOST_IN_A_FILE = {"num_workers": 1024, "prefetch_factor": 4096, "device_prefetch": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Legal settings of a DataLoader.

    Pass them to any DataLoader: `DataLoader(dataset, batch_size=64, **config.to_kwargs())`, or apply them to one:
    `loader = config.apply_to(loader)`. Combinations that PyTorch refuses (such as a prefetch_factor without workers)
    cannot be constructed.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A value is out of range or does not fit the others; the message suggests a value.
    """

    num_workers: int = 0
    """Worker processes; 0 loads in the training process."""
    prefetch_factor: int | None = None
    """Batches each worker may hold ready, at least 1. With workers, None becomes torch's default of 2; without, None."""
    pin_memory: bool = False
    """Copy batches into page-locked memory before they are handed out."""
    persistent_workers: bool = False
    """Keep workers alive between epochs; they keep their copy of the dataset too."""
    in_order: bool = True
    """Deliver batches in the sampler's order. False lets a late batch be overtaken."""
    multiprocessing_context: str | None = None
    """Start method of the workers; None leaves the interpreter's default."""
    batch_size: int | None = None
    """Samples per batch where the user allowed it to be tuned; never part of `to_kwargs()`."""
    device_prefetch: int = 0
    """Batches that `DevicePrefetcher` copies ahead on a side stream; 0 is off."""

    def __post_init__(self) -> None:
        require_int("num_workers", self.num_workers, minimum=0)
        if self.prefetch_factor is None and self.num_workers > 0:
            object.__setattr__(self, "prefetch_factor", TORCH_PREFETCH_FACTOR)
        for name in ("prefetch_factor", "batch_size"):
            require_int(name, getattr(self, name), minimum=1, or_none=True)
        require_int("device_prefetch", self.device_prefetch, minimum=0)
        for name in ("pin_memory", "persistent_workers", "in_order"):
            require_bool(name, getattr(self, name))
        if self.multiprocessing_context is not None:
            require_choice("multiprocessing_context", self.multiprocessing_context, START_METHODS)
        for name, without_workers in WITHOUT_WORKERS.items() if self.num_workers == 0 else ():
            if (value := getattr(self, name)) != without_workers:
                raise ValueError(
                    f"{name}={value!r} needs worker processes, but num_workers=0. "
                    f"Try {name}={without_workers!r} or num_workers=1."
                )

    @classmethod
    def from_loader(cls, loader: Any) -> LoaderConfig:
        """The settings of a `torch.utils.data.DataLoader`, which is not iterated."""
        if not (workers := int(loader.num_workers)):
            return cls(pin_memory=bool(loader.pin_memory))
        context = loader.multiprocessing_context
        return cls(
            num_workers=workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=bool(loader.pin_memory),
            persistent_workers=bool(loader.persistent_workers),
            in_order=bool(getattr(loader, "in_order", True)),  # torchdata's had none at first
            multiprocessing_context=context.get_start_method() if context is not None else None,
        )

    def key(self) -> LoaderConfig:
        """The configuration without what evidence of a rate cannot tell apart: whether workers live on after an epoch."""
        return replace(self, persistent_workers=False)

    @property
    def batches_in_flight(self) -> int:
        """The most that its queues hold, and the one that is handed over."""
        return self.num_workers * (self.prefetch_factor or 0) + 1

    def with_workers(self, num_workers: int, prefetch_factor: int | None = None) -> LoaderConfig:
        """The configuration with another number of workers, and without what only workers have where there are none."""
        if num_workers == 0:
            return replace(self, num_workers=0, **WITHOUT_WORKERS)
        return replace(self, num_workers=num_workers, prefetch_factor=prefetch_factor or self.prefetch_factor)

    def to_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `torch.utils.data.DataLoader`.

        Beyond `num_workers` and `pin_memory` they have only what differs from the defaults, so they also fit a
        PyTorch that does not know newer arguments.
        """
        kwargs: dict[str, Any] = {"num_workers": self.num_workers, "pin_memory": self.pin_memory}
        if self.num_workers > 0:
            kwargs |= {"prefetch_factor": self.prefetch_factor, "persistent_workers": self.persistent_workers}
            newer = {"in_order": self.in_order, "multiprocessing_context": self.multiprocessing_context}
            kwargs |= {name: value for name, value in newer.items() if value != WITHOUT_WORKERS[name]}
        return kwargs

    def apply_to(self, loader: _Loader, *, device: Any = None) -> _Loader:
        """Return a loader with these settings: same dataset, sampler, shuffling and class.

        Args:
            loader: A DataLoader, or a subclass such as StatefulDataLoader. It does not change.
            device: Device of the step, if `device_prefetch` is set: a `DevicePrefetcher` then copies the loader's batches
                ahead. "cuda" by default.

        Raises:
            ValueError: `batch_size` is set, and this loader has a batch_sampler, which decides it; or its class keeps
                something that runs, such as a thread. The message names what to try.
        """
        from autotune_loader.pipeline.batches import prefetched_as_tuned
        from autotune_loader.pipeline.build import rebuild

        made: _Loader = prefetched_as_tuned(rebuild(loader, self), self, device or "cuda")
        return made

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as plain JSON values; the inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoaderConfig:
        """The configuration of a mapping such as `to_dict()` makes; unknown keys are ignored.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        known = {field.name for field in fields(cls)}
        for name, most in _MOST_IN_A_FILE.items():
            if isinstance(values.get(name), int) and values[name] > most:
                raise ValueError(f"{name}={values[name]} is larger than the maximum of {most}. Try {name}=2.")
        return cls(**{name: value for name, value in values.items() if name in known})

    def words(self) -> list[str]:
        """What differs from torch's defaults beyond workers and prefetching, such as ["pinned", "persistent"]."""
        told = [
            ("pinned", self.pin_memory),
            ("persistent", self.persistent_workers),
            ("out of order", not self.in_order),
            (f"{self.multiprocessing_context}", self.multiprocessing_context),
            (f"device prefetch {self.device_prefetch}", self.device_prefetch),
            (f"batch {self.batch_size}", self.batch_size),
        ]
        return [word for word, applies in told if applies]

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker" + ("" if self.num_workers == 1 else "s")
        ahead = [f"prefetch {self.prefetch_factor}"] if self.num_workers else []
        return ", ".join([workers, *ahead, *self.words()])


# Checks of one argument: the error names the argument, its value and one to try.


def require_int(name: str, value: object, *, minimum: int, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    said = f"{name}={value!r} must be an integer >= {minimum}. Try {name}={max(minimum, 1)}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(said)
    if value < minimum:
        raise ValueError(said)


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool. Try {name}=False.")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the choices; the error suggests the nearest."""
    if value not in choices:
        known, works = ", ".join(map(repr, choices)), nearest(str(value), choices) or choices[0]
        raise ValueError(f"{name}={value!r} is not one of {known}. Try {name}={works!r}.")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that may have been meant; None where none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)
