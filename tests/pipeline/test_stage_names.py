"""A frame of the user's is given the name that they know it by, and the line: frames are taken where the work would be."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from autotune_loader.pipeline import stage_watch
from autotune_loader.pipeline.stage_names import UNKNOWN, line_of
from autotune_loader.pipeline.tracing import TracedCollate, TracedDataset, TracedIterable, forget_open_batch

seen: list[tuple[str, str] | None] = []


def look() -> None:
    """What a watcher would see of whoever calls this."""
    seen.append(line_of(sys._getframe(1)))


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    seen.clear()
    yield
    forget_open_batch()


def stages(dataset: Any) -> list[str]:
    """Stages of one sample, in the order they were seen, each of which told its line of this file."""
    TracedDataset(dataset).__getitems__([0])
    assert all(each is not None and each[1].startswith("test_stage_names.py:") for each in seen), seen
    return [each[0] for each in seen if each]


class Of(Dataset[Any]):
    """A dataset whose samples are what a function makes of their index."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Any) -> Any:
        for t in self.transforms:
            sample = t(sample)
        return sample


class Flip:
    def __call__(self, sample: Any) -> Any:
        look()
        return self.turned(sample)

    def turned(self, sample: Any) -> Any:
        look()
        return sample


class Layer(nn.Module):
    def forward(self, sample: Any) -> Any:
        look()
        return sample


def crop(sample: Any, by: int = 0) -> Any:
    look()
    return sample


def test_what_a_dataset_calls_is_a_stage() -> None:
    class Photos(Of):
        def __getitem__(self, index: int) -> Any:
            return self.augment(self.fetch(index))

        def fetch(self, index: int) -> Any:
            look()
            return index

        def augment(self, sample: Any) -> Any:
            return [crop(each) for each in (sample, sample)]

    # the outermost function of the user's below __getitem__, however deep and often it is at work
    assert stages(Photos(crop)) == ["fetch", "augment", "augment"]


@pytest.mark.parametrize(
    ("transform", "names"),
    [
        (Compose(Flip(), crop), ["Flip", "Flip", "crop"]),
        (Compose(Compose(Flip()), Compose(crop)), ["Flip", "Flip", "crop"]),
        (Compose(crop, crop), ["crop", "crop"]),
        (Compose(Flip(), Flip()), ["Flip", "Flip", "Flip (2)", "Flip (2)"]),
        (Compose(functools.partial(crop, by=3)), ["crop"]),
        (Compose(lambda sample: crop(sample)), ["lambda"]),
        (nn.Sequential(Layer()), ["Layer"]),
        (Compose(nn.Sequential(nn.Identity(), Layer())), ["Layer"]),
        (functools.partial(crop, by=3), ["crop"]),
        (lambda sample: look(), ["lambda"]),
    ],
)
def test_members_of_containers_are_stages(transform: Any, names: list[str]) -> None:
    assert stages(Of(transform)) == names


def test_containers_that_pass_keywords_on() -> None:
    class Albumentations(Compose):
        def __call__(self, *, image: Any) -> Any:
            data = {"image": image}
            for t in self.transforms:
                data = t(**data)
            return data

    def blur(image: Any) -> Any:
        look()
        return {"image": image}

    assert stages(Of(lambda index: Albumentations(blur)(image=index))) == ["blur"]


def test_wrappers_of_torch_are_looked_through() -> None:
    assert stages(Subset(ConcatDataset([Of(crop), Of(crop)]), [5])) == ["crop"]


def test_recursion_is_one_stage() -> None:
    def walk(depth: int) -> None:
        if depth:
            walk(depth - 1)
        else:
            look()

    assert stages(Of(walk)) == ["walk"]


def test_streams_and_collating() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield self.made()

        def made(self) -> int:
            look()
            return 1

    def joined(samples: Any) -> Any:
        look()
        return samples

    batch = [next(iter(TracedIterable(Stream())))]
    TracedCollate(joined, batched=True)(batch)
    assert [each and each[0] for each in seen] == ["made", "collate"]


def test_nothing_outside_of_a_batch() -> None:
    look()
    assert seen == [None]


def library(module: str, name: str, body: str = "inner()") -> Callable[[Callable[[], Any]], Any]:
    """A function as an installed library has it."""
    names: dict[str, Any] = {"__name__": module}
    path = f"/venv/lib/python3/site-packages/{module.replace('.', '/')}.py"
    exec(compile(f"def {name}(inner):\n    return {body}", path, "exec"), names)
    return names[name]


@pytest.mark.parametrize(
    ("module", "name", "stage"),
    [
        ("PIL.Image", "open", "read"),
        ("PIL.Image", "convert", "decode"),
        ("PIL.ImageFile", "load", "decode"),
        ("PIL.Image", "resize", "prepare"),
        ("h5py._hl.dataset", "__getitem__", "read"),
        ("torchvision.io.image", "decode_jpeg", "decode"),
        ("numpy.lib.npyio", "load", "read"),
        ("json", "loads", "decode"),
        ("pydicom.dataset", "pixel_array", "decode"),
    ],
)
def test_what_libraries_read_and_decode_has_its_own_name(module: str, name: str, stage: str) -> None:
    # GIVEN a function of the user's that leaves the work to a library
    called = library(module, name)

    def prepare(index: int) -> Any:
        return called(lambda: seen.append(line_of(sys._getframe(1))))

    # THEN it is known for what it does, and the line is the user's
    found = stages(Of(prepare))
    assert found == [stage]
    assert f"{module}." in (seen[0] or UNKNOWN)[1]


def test_datasets_of_libraries_are_named_by_their_own_line() -> None:
    dataset = TensorDataset(torch.zeros(3))
    TracedDataset(dataset).__getitems__([0])
    assert seen == []
    fetch = library("lib.data", "__getitem__", "inner()")
    TracedDataset(Of(lambda index: fetch(look))).__getitems__([0])
    assert seen[0] is not None


def test_objects_that_raise_when_looked_at_end_nothing() -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

        def __call__(self, sample: Any) -> Any:
            transforms = [self]
            for t in transforms:
                seen.append(stage_watch._line_of(sys._getframe()))
                del t
            return sample

    TracedDataset(Of(Odd())).__getitems__([0])
    assert seen == [UNKNOWN]


def test_code_that_a_library_made_at_run_time_is_no_line_of_the_users() -> None:
    # GIVEN a library that makes a namedtuple, whose code is of no file
    made: dict[str, Any] = {"look": look}
    exec(compile("def fields():\n    look()", "<string>", "exec"), made)
    called = library("PIL.Image", "open")

    def prepare(index: int) -> Any:
        return called(made["fields"])

    assert stages(Of(prepare)) != []  # of this file
