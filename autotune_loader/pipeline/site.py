"""Which loader it is: by the line of code that makes it and what it reads, however often a script makes it anew.

People read a loader's name and contents; loaders of one site are told of as one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import RandomSampler

from autotune_loader.lines import Line

NOWHERE = Line("?", 0)
"""Stands for a line that cannot be told."""


class Site(NamedTuple):
    """Where a loader is made, and what it reads, by attributes alone: lengths are the user's code, which may draw or count."""

    line: Line
    dataset: str
    """Its class."""
    batch_size: int | None
    is_shuffled: bool

    @classmethod
    def of(cls, loader: Any, line: Line | None) -> Site:
        """The site of a loader that was made at this line; None where no line is known."""
        dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
        while (inner := getattr(batches, "batch_sampler", None)) is not None:  # as Accelerate shards them
            batches = inner
        sampler = getattr(batches, "sampler", None)
        sampler = sampler if sampler is not None else getattr(loader, "sampler", None)  # an array has no truth
        return cls(
            line=line or NOWHERE,
            dataset=type(dataset).__name__,
            batch_size=size if isinstance(size, int) else None,
            is_shuffled=isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True,
        )

    def contents(self, samples: int | None = None) -> str:
        """What it reads, for people: "Images[1200], batches of 32, shuffled"; `samples` of an epoch, as counted."""
        length = "" if samples is None else f"[{samples}]"
        size = "" if self.batch_size is None else f", batches of {self.batch_size}"
        return f"{self.dataset}{length}{size}{', shuffled' if self.is_shuffled else ''}"
