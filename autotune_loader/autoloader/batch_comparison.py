"""Whether workers' batches may be used: their first ones, and then ever fewer, are fetched by the loop as well.

    first fetch   what it makes ready (a file that is opened) is noted, so that workers begin without it
    4 fetches     watched: what they change or write, only the training process may
    workers       a batch comes ── the loop fetches it, too, under the same seed ── the same? ── the loop's own is delivered
    each batch    has the training changed what workers have a copy of?

Batches 1 to 8 of workers are compared, then 16, 32, 64 ...
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autotune_loader.autoloader.parts import Noted, Parts, Prepared
from autotune_loader.autoloader.tuner import GATE_BATCHES
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.machine.elsewhere import changed_file

FIRST = 8
"""Batches of workers that are compared at first."""
WATCHED = 4
"""Fetches of the loop that are watched before workers may start."""
UNWATCHED = GATE_BATCHES // 2 - WATCHED
"""Batches of the loop before some are watched: short loops are left alone."""
MOST_DEPTH = 32
ULPS, ULPS_OF_HALVES = 64, 4
"""Units in the last place by which floats may differ, relative to the largest: threads add up in another order."""


class BatchComparison:
    """What is known of one loader's data.

    Args:
        named: dataset, collate function and samplers, by the names that people know them by.
        refuse: told what speaks against workers.
        is_asked: whether the script asked for workers: then fetches of the loop leave nothing behind.

    Attributes:
        prepared: what the loop's fetches have made ready, which workers begin without.
        compared: batches of workers that were the loop's own.
    """

    def __init__(self, named: dict[str, Any], refuse: Callable[[Finding], None], *, is_asked: bool) -> None:
        self._named, self._refuse, self._is_asked = named, refuse, is_asked
        self.prepared = Prepared()
        self.fetched = self.watched = self.compared = self.delivered = self._drawn = 0
        self._parts = Parts(named)
        self._first: Noted | None = None
        self._seen: Noted | None = None
        self._whole: Noted | None = None

    @property
    def allows_another(self) -> bool:
        """Whether another number of workers than the one asked for may run: or be started, to be compared."""
        return self.compared >= FIRST if self._is_asked else self.watched >= WATCHED

    def own(self, make: Callable[[], Any]) -> Any:
        """A fetch of the loop; the first one and some before workers start are watched."""
        self.fetched += 1
        if self.fetched == 1:
            before = self._parts.noted()
            try:
                return make()
            finally:
                self.prepared.add(before)
                self._parts = Parts(self._named)
        if self.fetched <= UNWATCHED or self.watched >= WATCHED:
            return make()
        return self._watch(make)

    def _watch(self, make: Callable[[], Any]) -> Any:
        before, self.watched = self._parts.noted(), self.watched + 1
        self._first = self._first or before
        with written() as files:
            try:
                made = make()
            finally:
                self.prepared.add(before)
                if (what := before.changed()) is not None:
                    self._refuse(Kept.DATASET_CHANGES(what=what))
        if files:
            self._refuse(Kept.WRITES_FILES(path=files[0]))
        if self.watched == WATCHED and not self._is_asked and (what := self._first.changed()) is not None:
            self._refuse(Kept.TRAINING_CHANGES(what=what))
        return made

    def is_due(self) -> bool:
        """Whether the batch that has come from a worker now is to be fetched by the loop as well."""
        self.delivered += 1
        return self.delivered <= FIRST or self.delivered & (self.delivered - 1) == 0

    def compare(self, make: Callable[[], Any], other: Any, number: int) -> Any:
        """The loop's own batch; where a worker's is another one, workers are refused."""
        own = self._watch(make)
        if self._is_asked:
            self.prepared.undo()
        what = difference(own, other)
        if what is None:
            self.compared += 1
        else:
            self._refuse(Kept.SAMPLES_DIFFER(batch=number, what=what))
        return own

    def draw(self, draw: Callable[[], Any]) -> Any:
        """An index batch of a sampler of the script's own, which may draw from global generators between two of them.

        Then nothing may be drawn ahead. With the first one a whole order may be drawn.
        """
        if self._drawn >= WATCHED:
            return draw()
        self._drawn += 1
        before = _global_states()
        drawn = draw()
        if self._drawn > 1 and _global_states() != before:
            self._refuse(Kept.SAMPLER_DRAWS())
        return drawn

    def begin(self) -> None:
        """Workers are started."""
        self._parts = Parts(self._named)
        self._seen, self._whole = self._parts.noted(), self._parts.noted(whole=True)

    def changed(self) -> str | None:
        """What the training has changed since workers began."""
        return None if self._seen is None else self._seen.changed()

    def has_stayed(self) -> bool:
        """Whether all is as it was when workers began, so that they can be kept for another epoch."""
        seen, whole = self._seen, self._whole
        return seen is not None and whole is not None and whole.is_whole and not (seen.changed() or whole.changed())


def _global_states() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


def difference(own: Any, other: Any, path: str = "batch", depth: int = MOST_DEPTH) -> str | None:
    """The path of the first value by which two batches differ; None where they are the same."""
    if type(own) is not type(other) or not depth:
        return path
    if isinstance(own, torch.Tensor):
        return None if _are_same_tensors(own, other) else path
    if isinstance(own, np.ndarray) and own.dtype.hasobject:
        return difference(own.tolist(), other.tolist(), path, depth - 1)
    if isinstance(own, (np.ndarray, np.generic, float, complex)):
        return None if _are_same_arrays(np.asarray(own), np.asarray(other)) else path
    if own is None or isinstance(own, (bool, int, str, bytes, bytearray, type, set, frozenset)):
        return None if own == other else path
    mine, others = _inside(own), _inside(other)
    if list(mine) != list(others):
        return path
    for name, value in mine.items():
        if value is not others[name] and (found := difference(value, others[name], path + name, depth - 1)) is not None:
            return found
    return None


def _inside(value: Any) -> dict[str, Any]:
    """What a container or an object consists of; of the latter, as pickle sees it."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{number}]": each for number, each in enumerate(value)}
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global's name
        return {"": reduced}
    made_with, state = (*reduced, None)[1:3]
    named = {f".{name}": each for name, each in state.items()} if isinstance(state, dict) else {"": state}
    return {" as it was made": made_with, **named}


def _are_same_tensors(own: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        kinds = [(each.dtype, each.layout, each.device.type, each.requires_grad) for each in (own, other)]
        if kinds[0] != kinds[1]:
            return False
        if own.is_nested:
            return own.size(0) == other.size(0) and all(map(_are_same_tensors, own.unbind(), other.unbind()))
        if own.shape != other.shape:
            return False
        if own.layout is not torch.strided:
            own, other = own.to_dense(), other.to_dense()
        if torch.equal(own, other):
            return True
        if not (own.is_floating_point() or own.is_complex()):
            return False
        finite = own[torch.isfinite(own)].abs()
        ulps = ULPS if own.dtype in (torch.float32, torch.float64) else ULPS_OF_HALVES
        most = ulps * torch.finfo(own.dtype).eps * (float(finite.max()) if finite.numel() else 0.0)
        return torch.allclose(own, other, rtol=0.0, atol=most, equal_nan=True)


def _are_same_arrays(own: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if own.dtype != other.dtype or own.shape != other.shape:
        return False
    if own.dtype.kind not in "fc":
        return own.tobytes() == other.tobytes()
    finite = np.abs(own[np.isfinite(own)])
    most = ULPS * float(np.finfo(own.dtype).eps) * (float(finite.max()) if finite.size else 0.0)
    return np.allclose(own, other, rtol=0.0, atol=most, equal_nan=True)


@contextlib.contextmanager
def written() -> Iterator[list[str]]:
    """The files that this thread writes or removes in the meantime."""
    _listen()
    found = _listening[threading.get_ident()] = list[str]()
    try:
        yield found
    finally:
        del _listening[threading.get_ident()]


_listening: dict[int, list[str]] = {}
"""By thread."""


@functools.cache
def _listen() -> None:
    sys.addaudithook(_audit)  # it cannot be removed


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listening or (found := _listening.get(threading.get_ident())) is None:
        return
    path = arguments[0] if event == "os.chmod" else changed_file(event, arguments)
    is_nobodys = isinstance(path, int) or "__pycache__" in str(path) or str(path) == os.devnull
    if path is None or (event == "open" and is_nobodys):
        return
    found.append(os.fsdecode(path) if isinstance(path, bytes) else str(path))
