"""The demo's job: pictures that are whole, and a model that fits them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from torch.utils.data import DataLoader

from autotune_loader import demo


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


def test_the_factory_gives_what_tune_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a cache that holds a few pictures
    demo.make_jpegs(tmp_path, count=40)
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "make_jpegs", lambda folder: sorted(folder.glob("*.jpg")))
    # WHEN the factory is called
    job = demo.demo_factory()
    # THEN model and dataset fit together
    batch = next(iter(DataLoader(job["dataset_or_loader"], batch_size=job["batch_size"])))
    assert job["model"](batch[0]).shape == (job["batch_size"], demo.CLASSES)
