"""Earlier results on disk: found by what was tuned and where, private, bounded, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.results import cache
from autotune_loader.results.cache import (
    CACHE_VARIABLE,
    cache_folder,
    find,
    job_key,
    keep,
    recall,
    remember,
    result_key,
)
from autotune_loader.results.loader_file import Measured
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

HERE = Fingerprint(usable_cores=4, dataset="rows[64]", gpus=("A100",))
BEST = LoaderConfig(num_workers=3, prefetch_factor=4)


def rows(length: int = 64) -> TensorDataset:
    return TensorDataset(torch.zeros(length, 3))


def key(
    length: int = 64, batch_size: int = 8, machine: Fingerprint = HERE, own: LoaderConfig | None = None, **other: Any
) -> str:
    parts = {"model": torch.nn.Linear(3, 2), "collate_fn": collate, "loss_fn": None, "step": "no model", "ranks": 1}
    parts |= {name: other.pop(name) for name in parts if name in other}
    data = DataSide.from_dataset(rows(length), batch_size=batch_size, collate_fn=parts["collate_fn"])
    training = TrainingSide(model=parts["model"], loss_fn=parts["loss_fn"])
    workload, limits = Workload(data=data, training=training, own_config=own), TuneOptions(**other).limits()
    return result_key(workload, machine, limits, step=parts["step"], ranks=parts["ranks"])


def collate(samples: list[Any]) -> Any:
    return samples


RESULT = TuningResult(
    best=BEST,
    status="complete",
    baseline=LoaderConfig(),
    measured=Measured(samples_per_s=Interval(value=800.0, low=780.0, high=820.0, count=9)),
)


@pytest.fixture
def folder(cache_of_its_own: Path) -> Path:
    return cache_of_its_own / "results"


def kept(folder: Path, who: str = "") -> Path:
    """The file of an entry that was just kept in the cache, whose folder this is."""
    keep(who or key(), RESULT, budget_s=60.0)
    return folder / f"{who or key()}.json"


def test_what_was_kept_is_found_by_the_same_key_in_a_private_loader_json(folder: Path) -> None:
    path, found = kept(folder), find(key())
    assert found is not None
    assert (found.tuned_at or "").endswith("+00:00")
    assert found == replace(RESULT, tuned_at=found.tuned_at, spent=replace(RESULT.spent, budget_s=60.0))
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    assert list(path.parent.iterdir()) == [path]
    assert TuningResult.load(path) == found


OTHER_KEYS: list[dict[str, Any]] = [
    {"length": 65},
    {"model": torch.nn.Linear(3, 4)},
    {"machine": replace(HERE, usable_cores=8)},
    {"machine": replace(HERE, torch="2.6")},
    {"step": "train_step(model, batch)"},
    {"ranks": 2},
    {"own": LoaderConfig(num_workers=1, multiprocessing_context="spawn")},
    {"loss_fn": torch.nn.MSELoss()},
    {"allow": frozenset({"in_order"})},
    {"max_workers": 2},
    {"tolerance": 0.05},
]
SAME_KEYS: list[dict[str, Any]] = [
    {"model": torch.nn.Linear(3, 2)},
    {"collate_fn": partial(collate)},
    {"budget_s": 5.0, "seed": 7, "output": "loader.json"},
    {"own": LoaderConfig(num_workers=2)},
    {"machine": replace(HERE, driver="570")},
]


@pytest.mark.parametrize(
    ("other", "same"),
    [*((other, False) for other in OTHER_KEYS), *((other, True) for other in SAME_KEYS)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_a_key_is_that_of_workload_machine_and_limits_alone(other: dict[str, Any], same: bool) -> None:
    assert (key(**other) == key()) is same


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def to_link(path: Path) -> None:
    other = path.with_suffix(".other")
    path.rename(other)
    path.symlink_to(other)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "not measured": rewritten(lambda content: content.update(measured={})),
    "not kept by us": rewritten(lambda content: content.pop("tuned_at")),
    "a link": to_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_cannot_be_used_is_ignored_with_a_line_in_the_log(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept(folder)
    DAMAGES[damage](path)
    with caplog.at_level(logging.WARNING):
        assert find(key()) is None
    assert f"{path} is ignored" in caplog.text


def test_an_entry_of_another_user_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept(folder)
    monkeypatch.setattr(cache.os, "geteuid", lambda: os.getuid() + 1)
    assert find(key()) is None
    assert "another user" in caplog.text


def test_only_a_complete_result_is_kept_and_where_nothing_was_kept_nothing_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(key(), replace(RESULT, status="partial"), budget_s=60.0)
    assert not folder.exists()
    with caplog.at_level(logging.DEBUG):
        assert find(key()) is None
    assert caplog.text == ""


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    kept(folder)
    assert "not kept for the next run" in caplog.text


def test_the_cache_is_bounded_and_keeps_what_was_used_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a full cache, whose oldest entry was used again, and a file of somebody else
    monkeypatch.setattr(cache, "MOST_ENTRIES", 3)
    oldest, unused, other = (kept(folder, key(batch_size=size)) for size in (8, 2, 3))
    for age, path in enumerate((other, unused, oldest)):
        os.utime(path, (1000 - age, 1000 - age))
    find(key())
    (folder / "notes.txt").write_text("mine")
    newest = kept(folder, key(batch_size=4))
    # THEN the one that was used the longest ago is gone; nothing else
    assert {path.name for path in folder.iterdir()} == {oldest.name, other.name, newest.name, "notes.txt"}


@pytest.mark.parametrize("off", ["", "0", "OFF", " no "])
def test_the_variable_turns_the_cache_off_or_moves_it(off: str, folder: Path) -> None:
    assert cache_folder({CACHE_VARIABLE: off}) is None
    assert cache_folder({CACHE_VARIABLE: str(folder)}) == folder
    assert "autotune-loader" in str(cache_folder({}))


def test_what_was_best_is_known_to_the_next_loader_of_the_same_data(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def job(samples: int, batch_size: int) -> str:
        return job_key(DataSide.from_loader(DataLoader(rows(samples), batch_size=batch_size)), HERE)

    remember(job(10, 2), BEST)
    assert [recall(job(*each)) for each in ((10, 2), (11, 2), (10, 5))] == [BEST, None, None]
    # WHEN its file holds nothing that can be used THEN nothing is known, and the log says why
    (folder.parent / "jobs" / f"{job(10, 2)}.json").write_text('{"config": {"num_workers": -1}}')
    assert recall(job(10, 2)) is None
    assert "is ignored" in caplog.text


def test_without_a_cache_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    remember("0" * 32, BEST)
    kept(folder)
    assert (recall("0" * 32), find(key())) == (None, None)
    assert not list(folder.parent.iterdir())
