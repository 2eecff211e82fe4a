"""JPEGs decoded to the size that is needed: libjpeg halves, quarters and eighths a picture while it decodes it.

    before    open ── decode 2048 x 1536 ── resize to 256 x 256
    after     open ── draft ── decode 512 x 384 ── resize to 256 x 256

How large a picture has to be is seen from what it is resized to first, in a few samples. Pixels differ a little from those
of a whole picture, so how far they do is told.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune_loader.pipeline.by_value import dumps, loads
from autotune_loader.pipeline.tracing import Wrapped
from autotune_loader.pipeline.transforms import with_seed
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.prepared_change import PreparedChange
from autotune_loader.values.measurement import ChangeFacts

SEEN = 16
"""Samples whose pictures are looked at: a random crop may need more of one than another."""
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Drafts(PreparedChange):
    """To which size JPEGs may be decoded."""

    size: Size
    """Width and height that a picture must keep."""

    @classmethod
    def of(cls, data: DataSide) -> Drafts:
        """The size that the samples seen need.

        Raises:
            ValueError: no JPEG is opened by PIL, none is resized, or none is twice as large as needed.
        """
        if data.is_iterable or data.sampler is None:
            raise ValueError("only the pictures of a map-style dataset are looked at")
        if "PIL" not in sys.modules:
            raise ValueError("the dataset opens no JPEG by PIL.Image.open")
        seen = with_seed(0, lambda: _pictures_of(data))
        if not seen:
            raise ValueError("the dataset opens no JPEG by PIL.Image.open, or resizes none")
        size = max(each.needed[0] for each in seen), max(each.needed[1] for each in seen)
        differences = [each.difference(size) for each in seen]
        drafted = [each for each in differences if each is not None]
        if not drafted:
            most = max(min(each.size[0] / size[0], each.size[1] / size[1]) for each in seen)
            raise ValueError(f"no JPEG is twice as large as it has to be: at most {most:.1f} times")
        code = f"after Image.open(path): image.draft('RGB', {size})"
        return cls(size=size, facts=ChangeFacts(code=code, difference=float(np.mean(drafted))))

    def after(self, data: DataSide) -> DataSide:
        return replace(data, dataset=Drafted(data.dataset, self.size))


class Drafted(Wrapped):
    """A dataset whose JPEGs are opened to be no smaller than a size; nothing else notices, as it holds for a fetch only."""

    def __init__(self, dataset: Any, size: Size) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_size", size)

    def __getitem__(self, index: Any) -> Any:
        with _opening(self._draft):
            return object.__getattribute__(self, "_inner")[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        inner = object.__getattribute__(self, "_inner")
        many = getattr(inner, "__getitems__", None)
        with _opening(self._draft):
            return many(indices) if many is not None else [inner[index] for index in indices]

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_inner"))

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (type(self), object.__getattribute__(self, "_inner"), object.__getattribute__(self, "_size"))
        return loads, (dumps(parts),)

    def _draft(self, image: Any) -> None:
        if image.format == "JPEG":
            image.draft("RGB", object.__getattribute__(self, "_size"))


@dataclass(frozen=True)
class _Picture:
    size: Size
    needed: Size
    again: Callable[[], Any]
    """Opens it once more."""

    def difference(self, size: Size) -> float | None:
        """How far a draft is from the whole picture made as small; None where it would be no smaller."""
        with self.again() as draft, self.again() as whole:
            draft.draft("RGB", size)
            if draft.size == whole.size:
                return None
            small = whole.convert("RGB").resize(draft.size, resample=4)  # the mean of the pixels below each (BOX)
            one, other = (np.asarray(each, dtype=np.float32) for each in (draft.convert("RGB"), small))
            return float(np.abs(one - other).mean() / 255)


def _pictures_of(data: DataSide) -> list[_Picture]:
    """The JPEGs that samples open, and what these need of them."""
    seen = (_picture_of(data.dataset, index) for index in itertools.islice(data.sampler, SEEN))
    return [each for each in seen if each is not None]


def _picture_of(dataset: Any, index: Any) -> _Picture | None:
    """Of one sample; None where it opens several, no JPEG, or resizes none."""
    opened: list[tuple[str, Size, Callable[[], Any] | None]] = []
    resized: list[tuple[Size, Size]] = []
    with (
        _opening(lambda image: opened.append((image.format, image.size, _again(image)))),
        _resizing(lambda part, to: resized.append((part, to))),
    ):
        dataset[index]
    if len(opened) != 1 or not resized:
        return None
    (kind, whole, again), (part, to) = opened[0], resized[0]
    if kind != "JPEG" or again is None:
        return None
    width, height = (min(had, math.ceil(had * wanted / of)) for had, wanted, of in zip(whole, to, part, strict=True))
    return _Picture(whole, (width, height), again)


def _again(image: Any) -> Callable[[], Any] | None:
    """Opens the same picture, by its path or its bytes."""
    import io

    from PIL import Image

    if getattr(image, "filename", ""):
        path = image.filename
        return lambda: Image.open(path)
    if getattr(image, "fp", None) is None or not image.fp.seekable():
        return None
    at = image.fp.tell()
    image.fp.seek(0)
    content = image.fp.read()
    image.fp.seek(at)
    return lambda: Image.open(io.BytesIO(content))


@contextlib.contextmanager
def _opening(see: Callable[[Any], None]) -> Iterator[None]:
    """Within the block every picture that PIL opens is shown first."""
    from PIL import Image

    original = Image.open

    def opened(*arguments: Any, **options: Any) -> Any:
        image = original(*arguments, **options)
        see(image)
        return image

    Image.open = opened
    try:
        yield
    finally:
        Image.open = original


@contextlib.contextmanager
def _resizing(see: Callable[[Size, Size], None]) -> Iterator[None]:
    """Within the block each `resize` tells the size of what it makes smaller, and to which."""
    from PIL import Image

    original = Image.Image.resize

    def resized(self: Any, size: Any, resample: Any = None, box: Any = None, *arguments: Any, **options: Any) -> Any:
        part = self.size if box is None else (box[2] - box[0], box[3] - box[1])
        see(part, tuple(size))
        return original(self, size, resample, box, *arguments, **options)

    Image.Image.resize = resized
    try:
        yield
    finally:
        Image.Image.resize = original
