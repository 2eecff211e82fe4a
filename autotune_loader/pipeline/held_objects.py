"""Large lists and dicts of Python objects that a dataset holds: forked workers copy their pages as they touch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune_loader.pipeline.workload import wrapped_datasets

LARGE = 10_000
"""With fewer objects the pages are a few MiB."""
STACKED, PLAIN = ("Tensor", "ndarray"), ("str", "bytes", "int", "float", "bool")
"""Classes of objects that one array can hold: stacked, or as its elements."""


@dataclass(frozen=True, slots=True)
class HeldObjects:
    """One of them."""

    name: str
    """Attribute of the dataset."""
    owner: str
    """Class of the dataset."""
    container: str
    length: int
    kind: str
    """Class of the first object."""

    def code(self) -> str:
        """What takes its place."""
        if self.container != "dict" and self.kind in STACKED:
            return f"self.{self.name} = {'torch' if self.kind == 'Tensor' else 'np'}.stack(self.{self.name})"
        if self.container != "dict" and self.kind in PLAIN:
            return f"self.{self.name} = np.array(self.{self.name})"
        return f"self.{self.name} as one array for each field, or an Arrow table"

    def __str__(self) -> str:
        return f"{self.owner}.{self.name} is a {self.container} of {self.length:,} objects ({self.kind})"


def largest_held(dataset: Any) -> HeldObjects | None:
    """The longest that the dataset, or one that it wraps, has as an attribute; None where none is large."""
    found = [
        HeldObjects(name, type(each).__name__, type(value).__name__, len(value), type(_first(value)).__name__)
        for each in wrapped_datasets(dataset)
        for name, value in list(getattr(each, "__dict__", {}).items())
        if type(value) in (list, tuple, dict) and len(value) >= LARGE
    ]
    return max(found, key=lambda held: held.length, default=None)


def _first(values: Any) -> Any:
    return next(iter(values.values() if isinstance(values, dict) else values))
