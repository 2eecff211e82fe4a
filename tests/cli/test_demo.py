"""The demo's job: pictures that are whole, augmented samples, and a model that fits them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from autotune_loader import demo


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    demo.make_jpegs(folder, count=40)
    return folder


def test_an_interrupted_call_is_completed_by_the_next_with_the_same_pictures(tmp_path: Path) -> None:
    # GIVEN pictures of which one is missing
    paths = demo.make_jpegs(tmp_path, count=3, size=(80, 60))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    paths[1].unlink()
    # WHEN they are asked for again
    assert demo.make_jpegs(tmp_path, count=3, size=(80, 60)) == paths
    # THEN it is made anew as it was, the others are untouched, and nothing else is left
    assert [path.read_bytes() for path in paths] == [content for content, _ in before]
    assert [path.stat().st_mtime_ns == at for path, (_, at) in zip(paths, before, strict=True)] == [True, False, True]
    assert sorted(tmp_path.iterdir()) == paths
    with Image.open(paths[0]) as picture:
        assert (picture.format, picture.size) == ("JPEG", (80, 60))


def test_a_sample_is_augmented_by_torchs_generator(pictures: Path) -> None:
    dataset = demo.JpegFolder(pictures)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        (first, label), (other, _) = dataset[13], dataset[13]
        torch.manual_seed(3)
        same, _ = dataset[13]
    assert (first.shape, first.dtype, label) == ((3, demo.CROP, demo.CROP), torch.float32, 13 % demo.CLASSES)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_factory_gives_what_tune_takes(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a cache that holds the pictures
    monkeypatch.setattr(demo, "cache_folder", lambda: pictures)
    monkeypatch.setattr(demo, "make_jpegs", lambda folder: sorted(folder.glob("*.jpg")))
    # WHEN the factory is called
    job = demo.demo_factory()
    # THEN model and dataset fit together
    batch = next(iter(DataLoader(job["dataset_or_loader"], batch_size=job["batch_size"])))
    assert job["model"](batch[0]).shape == (job["batch_size"], demo.CLASSES)
