from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from autotune_loader import demo
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError, MissingExtraError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    demo.make_jpegs(folder, count=40)
    return folder


def contents(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


def test_makes_jpeg_files_of_the_size_asked_for(tmp_path: Path) -> None:
    # WHEN a few small pictures are asked for
    paths = demo.make_jpegs(tmp_path, count=3, size=(80, 60))
    # THEN each file is a JPEG of that size
    for path in paths:
        with Image.open(path) as picture:
            assert (picture.format, picture.size) == ("JPEG", (80, 60))


def test_a_second_call_keeps_the_files(tmp_path: Path) -> None:
    # GIVEN files made before
    paths = demo.make_jpegs(tmp_path, count=3, size=(80, 60))
    made = [path.stat().st_mtime_ns for path in paths]
    # WHEN the same ones are asked for again
    again = demo.make_jpegs(tmp_path, count=3, size=(80, 60))
    # THEN they are the same files, untouched
    assert again == paths
    assert [path.stat().st_mtime_ns for path in again] == made


def test_an_interrupted_run_is_completed_with_the_same_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a run that is interrupted while it writes its third file
    whole = contents(demo.make_jpegs(tmp_path / "whole", count=4, size=(80, 60)))
    save, calls = Image.Image.save, []

    def interrupted_save(self: Image.Image, path: Path, *args: object, **kwargs: object) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        save(self, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", interrupted_save)
        with pytest.raises(KeyboardInterrupt):
            demo.make_jpegs(tmp_path / "cut", count=4, size=(80, 60))
    # WHEN it is run again
    repaired = demo.make_jpegs(tmp_path / "cut", count=4, size=(80, 60))
    # THEN all is as if nothing had happened, and nothing half-done is left
    assert contents(repaired) == whole
    assert list((tmp_path / "cut").glob("*.part")) == []


def test_a_sample_is_a_normalised_tensor_with_its_label(pictures: Path) -> None:
    # WHEN a sample is taken
    picture, label = demo.JpegFolder(pictures)[13]
    # THEN it is what the model takes
    assert picture.shape == (3, demo.CROP, demo.CROP)
    assert picture.dtype == torch.float32
    assert picture.is_contiguous()
    assert -2.2 < picture.min() < picture.max() < 2.7  # (0 - mean) / std and (1 - mean) / std
    assert label == 13 % demo.CLASSES


def test_a_sample_is_augmented_by_torchs_generator(pictures: Path) -> None:
    dataset = demo.JpegFolder(pictures)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, other = dataset[0][0], dataset[0][0]
        torch.manual_seed(3)
        same = dataset[0][0]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_an_epoch_trains_the_model_and_returns_a_rate(pictures: Path) -> None:
    # GIVEN a model and a loader whose last batch is short
    model = demo.SmallCnn()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    # WHEN an epoch is trained
    rate = demo.train_one_epoch(DataLoader(demo.JpegFolder(pictures), batch_size=16), model)
    # THEN there is a rate, and every parameter has moved
    assert rate > 0
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_factory_gives_what_tune_takes(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a cache that holds the pictures
    monkeypatch.setattr(demo, "cache_folder", lambda: pictures)
    monkeypatch.setattr(demo, "make_jpegs", lambda folder: sorted(folder.glob("*.jpg")))
    # WHEN the factory is called
    job = demo.demo_factory()
    # THEN model and dataset fit together
    batch = next(iter(DataLoader(job["dataset_or_loader"], batch_size=job["batch_size"])))
    assert job["model"](batch[0]).shape == (job["batch_size"], demo.CLASSES)


def test_tuned_threads_do_not_reach_the_default_epochs(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a tuned configuration with another number of intra-op threads
    threads = torch.get_num_threads()
    other = 2 if threads == 1 else 1
    seen: list[int] = []
    monkeypatch.setattr(demo, "train_one_epoch", lambda loader, model: float(seen.append(torch.get_num_threads()) or 1))
    # WHEN epochs are trained by turns
    try:
        demo.compare_epochs(LoaderConfig(consumer_threads=other), demo.JpegFolder(pictures))
    finally:
        torch.set_num_threads(threads)
    # THEN the defaults had this process' threads, and those as tuned the other number
    assert seen == [threads, *[threads, other] * demo.TURNS]


def test_the_second_process_prints_both_rates_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autotune_loader.load_config", lambda path: LoaderConfig(num_workers=3), raising=False)
    monkeypatch.setattr(demo, "make_jpegs", lambda folder: [])
    monkeypatch.setattr(demo, "compare_epochs", lambda config, dataset, device: (400.0, 700.0))
    assert demo.main(["loader.json"]) == 0
    assert capsys.readouterr().out == (
        "one epoch with torch's defaults       400 samples/s\n"
        "one epoch with loader.json            700 samples/s   1.75x   (3 workers, prefetch 2)\n"
    )


def test_an_unreadable_file_is_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unreadable(path: str) -> LoaderConfig:
        raise ConfigFileError(f"{path} does not exist")

    monkeypatch.setattr("autotune_loader.load_config", unreadable, raising=False)
    assert demo.main(["nowhere.json"]) == 2
    assert "nowhere.json does not exist" in capsys.readouterr().err


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN an installation without Pillow
    real_import = builtins.__import__

    def without_pillow(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    monkeypatch.delitem(sys.modules, "autotune_loader.demo")
    # WHEN the demo is imported THEN the error says what to install
    with pytest.raises(MissingExtraError, match=r"pip install 'autotune-loader\[demo\]'"):
        importlib.import_module("autotune_loader.demo")
