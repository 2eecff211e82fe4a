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
from autotune_loader.results.cache import find, job_key, keep, recall, remember, result_key
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
    *, length: int = 64, batch_size: int = 8, collate_fn: Any = len, model: Any = None, loss_fn: Any = None,
    own: LoaderConfig | None = None, machine: Fingerprint = HERE, step: str = "no model", ranks: int = 1, **options: Any,
) -> str:  # fmt: skip
    data = DataSide.from_dataset(rows(length), batch_size=batch_size, collate_fn=collate_fn)
    training = TrainingSide(model=model or torch.nn.Linear(3, 2), loss_fn=loss_fn)
    workload = Workload(data=data, training=training, own_config=own)
    return result_key(workload, machine, TuneOptions(**options).limits(), step=step, ranks=ranks)


MEASURED = Measured(samples_per_s=Interval(value=800.0, low=780.0, high=820.0, count=9))
RESULT = TuningResult(best=BEST, status="complete", measured=MEASURED)


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


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"length": 65}, False),
        ({"model": torch.nn.Linear(3, 4)}, False),
        ({"machine": replace(HERE, usable_cores=8)}, False),
        ({"machine": replace(HERE, torch="2.6")}, False),
        ({"step": "train_step(model, batch)"}, False),
        ({"ranks": 2}, False),
        ({"own": LoaderConfig(num_workers=1, multiprocessing_context="spawn")}, False),
        ({"loss_fn": torch.nn.MSELoss()}, False),
        ({"allow": frozenset({"in_order"})}, False),
        ({"max_workers": 2}, False),
        ({"tolerance": 0.05}, False),
        ({"model": torch.nn.Linear(3, 2)}, True),
        ({"collate_fn": partial(len)}, True),
        ({"budget_s": 5.0, "seed": 7, "output": "loader.json"}, True),
        ({"own": LoaderConfig(num_workers=2)}, True),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_a_key_is_that_of_workload_machine_and_limits_alone(other: dict[str, Any], same: bool) -> None:
    assert (key(**other) == key()) is same


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "not measured": lambda path: rewritten(path, measured={}),
    "not kept by us": lambda path: rewritten(path, tuned_at=None),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".other"))),
    "of another user": lambda path: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_cannot_be_used_is_ignored_with_a_line_in_the_log(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept(folder)
    DAMAGES[damage](path)
    monkeypatch.setattr(cache.os, "geteuid", lambda: os.getuid() + (damage == "of another user"))
    with caplog.at_level(logging.WARNING):
        assert find(key()) is None
    assert f"{path} is ignored" in caplog.text


def test_only_a_complete_result_is_kept_and_where_nothing_was_kept_nothing_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(key(), replace(RESULT, status="partial"), budget_s=60.0)
    assert not folder.exists()
    with caplog.at_level(logging.DEBUG):
        assert find(key()) is None
    assert caplog.text == ""
    # BUT a folder that cannot be written costs a line in the log
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


def test_what_was_best_is_known_to_the_next_loader_of_the_same_data(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def job(samples: int, size: int) -> str:
        return job_key(DataSide.from_loader(DataLoader(rows(samples), batch_size=size)), HERE)

    remember(job(10, 2), BEST)
    assert [recall(job(*each)) for each in ((10, 2), (11, 2), (10, 5))] == [BEST, None, None]
    # WHEN its file holds nothing that can be used THEN nothing is known, and the log says why
    (folder.parent / "jobs" / f"{job(10, 2)}.json").write_text('{"config": {"num_workers": -1}}')
    assert recall(job(10, 2)) is None
    assert "is ignored" in caplog.text


@pytest.mark.parametrize("off", ["", "0", "OFF", " no "])
def test_the_variable_turns_the_cache_off_or_moves_it(off: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AUTOTUNE_LOADER_CACHE", off)
        remember("0" * 32, BEST)
        kept(folder)
        assert (recall("0" * 32), find(key())) == (None, None)
    assert not list(folder.parent.iterdir())
    remember("0" * 32, BEST)
    assert (folder.parent / "jobs").exists()
    assert "autotune-loader" in str(cache.cache_folder({}))
