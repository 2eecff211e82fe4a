"""Pixels that travel as bytes and become floats in the step: a quarter of what workers write, and no arithmetic in them.

    before    open ── flip ── ToTensor ── Normalize ── collate ── queue ── step          floats travel
    after     open ── flip ── bytes ────────────────── collate ── queue ── floats, normalised ── step

Where the dataset's transform cannot be taken apart so, only what is collated is sent as bytes. Either way it is tried only
where the step then gets what it got before, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from autotune_loader.pipeline.batches import tensors_in
from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.transforms import (
    Transform,
    members_of,
    on_copy,
    part_of,
    same,
    with_members,
    with_seed,
)
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.prepared_change import PreparedChange
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.measurement import ChangeFacts

CHECKED = 4
"""Samples that are made both ways and compared."""
SCALES = (255.0, 1.0)
"""Floats between 0 and 1, as torchvision makes them, and whole numbers."""


@dataclass(frozen=True)
class Floats:
    """How floats come of bytes."""

    scale: float
    dtype: torch.dtype = torch.float32
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    """Of each channel, the third dimension from the end; empty where nothing is normalised."""
    _tensors: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def restored(self, pixels: torch.Tensor) -> torch.Tensor:
        """The floats, by the same operations in the same order as torchvision's, and so to the last bit."""
        values = pixels.to(self.dtype)
        if self.scale != 1:
            values = values.div_(self.scale)
        if self.mean:
            mean, std = self._channels(pixels.device)
            values = values.sub_(mean).div_(std)
        return values

    def _channels(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self._tensors.get(str(device))
        if kept is None:
            both = (torch.as_tensor(each, dtype=self.dtype, device=device) for each in (self.mean, self.std))
            kept = self._tensors[str(device)] = tuple(each.view(-1, 1, 1) for each in both)
        return kept

    def code(self) -> str:
        """What a step does with `x`."""
        divided = f".div({self.scale:.0f})" if self.scale != 1 else ""
        mean, std = (", ".join(f"{number:.6g}" for number in each) for each in (self.mean, self.std))
        normalised = f".sub(mean).div(std) with mean=[{mean}], std=[{std}]" if mean else ""
        return f"x = x.float(){divided}{normalised}"


@dataclass(frozen=True, kw_only=True)
class AsBytes(PreparedChange):
    """Which tensors of a batch travel as bytes, and how they become floats again."""

    floats: Mapping[int, Floats]
    """By the tensor's position in the batch."""
    members: Sequence[Transform] | None = None
    """What the dataset's transform does then; None where only the collated batch is changed."""

    @classmethod
    def of(cls, data: DataSide, batch: Any) -> AsBytes:
        """Taken apart at the dataset's transform where that works, else as a batch is collated.

        Raises:
            ValueError: no tensor of the batch would be the same.
        """
        if not _is_plain(batch):
            raise ValueError(f"a batch of type {type(batch).__name__} cannot be made anew from other tensors")
        return _by_transform(data) or _by_collating(batch)

    def after(self, data: DataSide) -> DataSide:
        if self.members is not None:
            return replace(data, dataset=with_members(data.dataset, self.members))
        return replace(data, collate_fn=CollatedBytes(data.collate_fn or default_collate, self.floats))

    def step(self, step: TrainingStep) -> TrainingStep:
        """One that makes the floats on the device, before it trains as ever."""
        train = step.train
        return replace(step, moves=True, train=lambda batch: train(self.restored(batch)))

    def restored(self, batch: Any) -> Any:
        return _mapped(batch, {number: each.restored for number, each in self.floats.items()})


class CollatedBytes:
    """A collate function whose floats leave as bytes."""

    def __init__(self, collate_fn: Callable[[Any], Any], floats: Mapping[int, Floats]) -> None:
        self._collate_fn, self._floats = collate_fn, floats

    def __call__(self, samples: Any) -> Any:
        changes = {number: partial(_bytes_of, scale=each.scale) for number, each in self._floats.items()}
        return _mapped(self._collate_fn(samples), changes)

    def __reduce__(self) -> tuple[Any, ...]:
        return loads, (dumps((type(self), self._collate_fn, self._floats)),)


def to_bytes(picture: Any) -> torch.Tensor:
    """Pixels of a picture, array or tensor of bytes, channels first as `ToTensor` has them.

    Raises:
        TypeError: they are no bytes.
    """
    if isinstance(picture, torch.Tensor):
        pixels = picture
    else:
        array = np.asarray(picture)
        pixels = torch.from_numpy(np.array(array))  # a copy: a picture's own bytes are not writable
        if pixels.ndim == 2 and not isinstance(picture, np.ndarray):
            pixels = pixels[:, :, None]
        if pixels.ndim == 3:
            pixels = pixels.permute(2, 0, 1).contiguous()
    if pixels.dtype != torch.uint8:
        raise TypeError(f"pixels of type {pixels.dtype} are no bytes")
    return pixels


def _by_transform(data: DataSide) -> AsBytes | None:
    """The transform without the member that makes floats, and without one that normalises them; None where it has none."""
    if data.is_iterable or not data.is_batched or not hasattr(data.dataset, "__getitem__"):
        return None
    members = members_of(data.dataset)
    try:
        found = with_seed(0, lambda: _floats_made_by(members, part_of(with_members(data.dataset, [])[0])))
        if found is None:
            return None
        position, scale, dtype = found
        kept, mean, std = _without_normalising(members[position + 1 :])
        made = replace(Floats(scale=scale, dtype=dtype), mean=mean, std=std)
        changed = with_members(data.dataset, [*members[:position], to_bytes, *kept])
        positions = _same_batch(data, changed, made)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
        return None
    name = getattr(members[position], "__name__", type(members[position]).__name__)
    dropped = " and no Normalize" if mean else ""
    code = f"in the transform PILToTensor() or its like in place of {name}{dropped}; in the step, on the device, {made.code()}"
    floats = dict.fromkeys(positions, made)
    return AsBytes(floats=floats, facts=ChangeFacts(code=code), members=[*members[:position], to_bytes, *kept])


def _floats_made_by(members: Sequence[Transform], sample: Any) -> tuple[int, float, torch.dtype] | None:
    """Position of the member that makes floats of bytes, by which scale, and of which type."""
    for position, member in enumerate(members):
        made = on_copy(member, sample)
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            pixels = to_bytes(sample)
            scale = next(
                (each for each in SCALES if torch.equal(Floats(each, made.dtype).restored(pixels), made)), None
            )
            return None if scale is None else (position, scale, made.dtype)
        sample = made
    return None


def _without_normalising(members: Sequence[Transform]) -> tuple[list[Transform], list[float], list[float]]:
    last = members[-1] if members else None
    mean, std = getattr(last, "mean", None), getattr(last, "std", None)
    if mean is None or std is None:
        return list(members), [], []
    return list(members[:-1]), *(torch.as_tensor(each).flatten().tolist() for each in (mean, std))  # type: ignore[return-value]


def _same_batch(data: DataSide, changed: Any, floats: Floats) -> list[int]:
    """Positions of the tensors that are bytes then.

    Raises:
        ValueError: none is, or a batch differs from what it was.
    """
    collate = data.collate_fn or default_collate
    numbers = [index % len(data.dataset) for index in range(CHECKED)]

    def batch_of(dataset: Any) -> Any:
        return with_seed(1, lambda: collate([dataset[number] for number in numbers]))

    old, new = batch_of(data.dataset), batch_of(changed)
    pairs = enumerate(zip(tensors_in(old), tensors_in(new), strict=True))
    positions = [number for number, (one, other) in pairs if one.dtype != other.dtype and other.dtype == torch.uint8]
    if not positions or not same(old, _mapped(new, dict.fromkeys(positions, floats.restored))):
        raise ValueError("samples differ")
    return positions


def _by_collating(batch: Any) -> AsBytes:
    """What is collated, as far as it is exact.

    Raises:
        ValueError: nothing is.
    """
    floats = {}
    for number, tensor in enumerate(tensors_in(batch)):
        if tensor.is_floating_point() and tensor.numel() > 1:
            for scale in SCALES:
                made = Floats(scale, tensor.dtype)
                if torch.equal(made.restored(_bytes_of(tensor, scale)), tensor):
                    floats[number] = made
                    break
    if not floats:
        raise ValueError(
            "no floats of a batch are exactly bytes, or bytes / 255; a dataset that leaves Normalize to the step would be"
        )
    made = next(iter(floats.values()))
    scaled = f".mul({made.scale:.0f}).round()" if made.scale != 1 else ""
    code = f"in the dataset x = x{scaled}.to(torch.uint8), or bytes from the start; in the step, on the device, {made.code()}"
    return AsBytes(floats=floats, facts=ChangeFacts(code=code))


def _bytes_of(values: torch.Tensor, scale: float) -> torch.Tensor:
    return (values if scale == 1 else (values * scale).round_()).to(torch.uint8)


def _is_plain(batch: Any) -> bool:
    if isinstance(batch, dict):
        return all(map(_is_plain, batch.values()))
    if isinstance(batch, (list, tuple)):
        return all(map(_is_plain, batch))
    return isinstance(batch, (torch.Tensor, str, bytes, int, float, type(None)))


def _mapped(batch: Any, changes: Mapping[int, Callable[[torch.Tensor], torch.Tensor]]) -> Any:
    """The batch with some tensors changed, by their position as in `tensors_in`."""
    numbers = iter(range(1 << 30))

    def again(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            change = changes.get(next(numbers))
            return value if change is None else change(value)
        if isinstance(value, dict):
            return type(value)((key, again(each)) for key, each in value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(again, value))
        return type(value)(map(again, value)) if isinstance(value, (list, tuple)) else value

    return again(batch)
