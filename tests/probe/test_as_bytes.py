"""Pixels as bytes: what a step gets is the same to the last bit, or it is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune_loader.pipeline.transforms import Members, same
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.as_bytes import AsBytes, to_bytes
from autotune_loader.probe.burst import run_burst
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan


def to_tensor(picture: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))).float().div(255)


def flipped(picture: Any) -> Any:
    return torch.flip(picture, (-1,)) if torch.rand(1) < 0.5 else picture


class Normalize:
    def __init__(self, mean: list[float], std: list[float]) -> None:
        self.mean, self.std = mean, std

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        shape = (-1, 1, 1)
        return picture.clone().sub_(torch.tensor(self.mean).view(shape)).div_(torch.tensor(self.std).view(shape))


class Pictures(Dataset[Any]):
    def __init__(self, *members: Any) -> None:
        self.pictures = np.random.default_rng(0).integers(0, 256, (16, 8, 6, 3), np.uint8)
        self.transform = Members(members)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.pictures[index]), index % 10


NORMALIZE = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def both(dataset: Dataset[Any], **options: Any) -> tuple[AsBytes, Any, Any]:
    """The change, a batch as it is, and one as the changed loader delivers it, of the same random numbers."""
    data = DataSide.from_loader(DataLoader(dataset, batch_size=4, **options))
    batch = next(iter(DataLoader(dataset, batch_size=4, **options)))
    found = AsBytes.of(data, batch)
    made = []
    for side in (data, found.after(data)):
        torch.manual_seed(3)
        made.append(next(iter(DataLoader(side.dataset, batch_size=4, collate_fn=side.collate_fn))))
    return found, *made  # type: ignore[return-value]


@pytest.mark.parametrize(
    "members",
    [[to_tensor], [to_tensor, NORMALIZE], [to_tensor, flipped, NORMALIZE], [lambda x: x[:4], to_tensor, NORMALIZE]],
    ids=["floats", "normalised", "flipped between", "cropped before"],
)
def test_bytes_take_the_place_of_floats_and_of_normalising(members: list[Any]) -> None:
    found, old, new = both(Pictures(*members))
    assert new[0].dtype == torch.uint8
    assert new[0].shape == old[0].shape
    assert same(found.restored(new), old)


def test_the_code_to_write_names_what_goes_and_what_the_step_does() -> None:
    found, *_ = both(Pictures(to_tensor, NORMALIZE))
    assert "in place of to_tensor and no Normalize" in found.facts.code
    assert "x = x.float().div(255).sub(mean).div(std) with mean=[0.485, 0.456, 0.406]" in found.facts.code


def test_floats_without_a_transform_leave_the_collate_function_as_bytes() -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            return {"pixels": torch.arange(8.0) + index, "weight": torch.tensor([0.3, 0.7]), "label": index}

    found, old, new = both(Rows())
    assert new["pixels"].dtype == torch.uint8
    assert new["weight"].dtype == torch.float32  # no bytes
    assert same(found.restored(new), old)
    assert "x.to(torch.uint8)" in found.facts.code


def test_a_stream_leaves_the_collate_function_as_bytes() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.full((4,), value / 255) for value in range(16)])

    found, old, new = both(Stream())
    assert new.dtype == torch.uint8
    assert same(found.restored(new), old)


def brighter(picture: torch.Tensor) -> torch.Tensor:
    return picture * 1.3 - 0.1


@pytest.mark.parametrize("members", [[to_tensor, brighter], [lambda x: x * 0.7, torch.from_numpy]])
def test_floats_that_are_no_bytes_are_refused(members: list[Any]) -> None:
    with pytest.raises(ValueError, match="exactly bytes"):
        both(Pictures(*members))


def test_arithmetic_between_floats_and_normalising_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves Normalize to the step"):
        both(Pictures(to_tensor, brighter, NORMALIZE))


def test_a_batch_that_cannot_be_made_anew_is_refused() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x = torch.zeros(4)

    data = DataSide.from_loader(DataLoader(Pictures(to_tensor)))
    with pytest.raises(ValueError, match="a batch of type Graph"):
        AsBytes.of(data, Graph())


def test_the_step_trains_on_floats() -> None:
    found, old, new = both(Pictures(to_tensor, NORMALIZE))
    seen: list[Any] = []
    step = TrainingStep(seen.append, "", torch.device("cpu"))
    found.step(step).run(new)
    assert same(seen[0], old)


def test_the_collate_function_travels_to_a_worker() -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), float(index))

    found, _, new = both(Rows())
    data = DataSide.from_loader(DataLoader(Rows(), batch_size=4))
    again = pickle.loads(pickle.dumps(found.after(data).collate_fn))
    assert same(again([Rows()[index] for index in range(4)]), new)


def test_pixels_come_channels_first() -> None:
    assert to_bytes(np.zeros((8, 6, 3), np.uint8)).shape == (3, 8, 6)
    with pytest.raises(TypeError, match="are no bytes"):
        to_bytes(np.zeros((8, 6, 3), np.float32))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_burst_moves_a_quarter_of_the_bytes_and_trains_on_the_same_floats() -> None:
    dataset, seen = Pictures(to_tensor, flipped, NORMALIZE), list[Any]()
    data = DataSide.from_loader(DataLoader(dataset, batch_size=4))
    found = AsBytes.of(data, next(iter(DataLoader(dataset, batch_size=4))))
    step = TrainingStep(lambda batch: seen.append(batch[0].dtype), "", torch.device("cpu"))
    plan, config = BurstPlan(max_s=0.2, min_s=0.1), LoaderConfig(num_workers=1)
    before, after = run_burst(data, step, config, plan), run_burst(found.after(data), found.step(step), config, plan)
    assert isinstance(before, Measurement)
    assert isinstance(after, Measurement)
    labels = 4 * 8
    assert after.batch_bytes - labels == (before.batch_bytes - labels) // 4
    assert set(seen) == {torch.float32}
