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

from autotune_loader import load_config
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.results import cache
from autotune_loader.results.cache import (
    CACHE_VARIABLE,
    MOST_ENTRIES,
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
RATE = Interval(value=800.0, low=780.0, high=820.0, count=9)


def rows(length: int = 64) -> TensorDataset:
    return TensorDataset(torch.zeros(length, 3))


def key(
    length: int = 64,
    batch_size: int = 8,
    model: Any = None,
    machine: Fingerprint = HERE,
    step: str = "no model",
    ranks: int = 1,
    own: LoaderConfig | None = None,
    collate_fn: Any = None,
    loss_fn: Any = None,
    **options: Any,
) -> str:
    data = DataSide.from_dataset(rows(length), batch_size=batch_size, collate_fn=collate_fn)
    workload = Workload(data=data, training=TrainingSide(model=model, loss_fn=loss_fn), own_config=own)
    return result_key(workload, machine, TuneOptions(**options).limits(), step=step, ranks=ranks)


def a_result(**changes: Any) -> TuningResult:
    best = TuningResult(
        best=BEST,
        status="complete",
        baseline=LoaderConfig(),
        measured=Measured(samples_per_s=RATE),
        summary=("Use 3 workers.",),
        fingerprint=HERE,
    )
    return replace(best, **changes)


@pytest.fixture
def folder(cache_of_its_own: Path) -> Path:
    return cache_of_its_own / "results"


def kept(folder: Path, who: str = "", result: TuningResult | None = None) -> Path:
    """The file of an entry that was just kept in the cache, whose folder this is."""
    keep(who or key(), result or a_result(), budget_s=60.0)
    return folder / f"{who or key()}.json"


def collate(samples: list[Any]) -> Any:
    return samples


def test_what_was_kept_is_found_by_the_same_key(folder: Path) -> None:
    # GIVEN a complete result
    kept(folder)

    # WHEN the same workload is tuned on the same machine again
    found = find(key())

    # THEN it is there
    assert found is not None
    assert found.tuned_at is not None
    assert found.tuned_at.endswith("+00:00")
    assert found == replace(a_result(), tuned_at=found.tuned_at, spent=replace(a_result().spent, budget_s=60.0))


OTHER_KEYS: list[dict[str, Any]] = [
    {"length": 65},
    {"batch_size": 16},
    {"model": torch.nn.Linear(3, 4)},
    {"machine": replace(HERE, usable_cores=8)},
    {"machine": replace(HERE, gpus=("H100",))},
    {"machine": replace(HERE, torch="2.6")},
    {"step": "train_step(model, batch)"},
    {"ranks": 2},
    {"own": LoaderConfig(num_workers=1, multiprocessing_context="spawn")},
    {"collate_fn": None},
    {"loss_fn": torch.nn.MSELoss()},
    {"allow": frozenset({"in_order"})},
    {"max_workers": 2},
    {"max_host_memory_bytes": 1 << 30},
    {"tolerance": 0.05},
    {"search": "tpe"},
]
SAME_KEYS: list[dict[str, Any]] = [
    {"model": torch.nn.Linear(3, 2)},
    {"collate_fn": partial(collate)},
    {"budget_s": 5.0},
    {"seed": 7},
    {"output": "loader.json"},
    {"own": LoaderConfig(num_workers=2)},
    {"machine": replace(HERE, driver="570")},
]


@pytest.mark.parametrize(
    ("other", "same"),
    [*((other, False) for other in OTHER_KEYS), *((other, True) for other in SAME_KEYS)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_a_key_is_that_of_workload_machine_and_limits_alone(other: dict[str, Any], same: bool) -> None:
    usual = {"model": torch.nn.Linear(3, 2), "collate_fn": collate}
    assert (key(**usual | other) == key(**usual)) is same


def test_a_model_that_does_not_know_its_size_yet_has_a_key() -> None:
    assert key(model=torch.nn.LazyLinear(2)) == key(model=torch.nn.LazyLinear(3))


def test_an_entry_is_a_private_loader_json(folder: Path) -> None:
    path = kept(folder, result=a_result(fingerprint=inspect_machine().fingerprint()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert load_config(path, on_mismatch="raise") == BEST


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


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "empty": lambda path: path.write_bytes(b""),
    "not text": lambda path: path.write_bytes(b"\xff" * 99),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "newer": rewritten(lambda content: content.update(schema_version="9.0")),
    "partial": rewritten(lambda content: content.update(status="partial")),
    "not measured": rewritten(lambda content: content.update(measured={})),
    "not kept by us": rewritten(lambda content: content.pop("tuned_at")),
    "other types": rewritten(lambda content: content.update(budget=[1, 2])),
    "illegal": rewritten(lambda content: content["dataloader_kwargs"].update(num_workers=-1)),
    "a link": to_link,
    "a folder": to_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_cannot_be_used_is_ignored_with_a_line_in_the_log(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # GIVEN an entry that something has damaged, or that somebody has put there
    path = kept(folder)
    DAMAGES[damage](path)

    # WHEN it is looked up THEN there is none, and the log says why
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


def test_where_nothing_was_kept_nothing_is_found_and_nothing_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert find(key()) is None
        assert recall(key()) is None
    assert caplog.text == ""


@pytest.mark.parametrize("status", ["partial", "fallback"])
def test_only_a_complete_result_is_kept(status: Any, folder: Path) -> None:
    kept(folder, result=a_result(status=status))
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    kept(folder)
    assert "not kept for the next run" in caplog.text


def test_the_cache_is_bounded_and_keeps_what_was_used_last(folder: Path) -> None:
    # GIVEN a full cache, whose oldest entry was used again, and a file of somebody else
    oldest = kept(folder)
    for number in range(MOST_ENTRIES):
        path = folder / f"{number:032x}.json"
        path.write_text("{}")
        os.utime(path, (1000 + number, 1000 + number))
    os.utime(oldest, (1, 1))
    find(key())
    (folder / "notes.txt").write_text("mine")

    # WHEN another one is kept
    newest = kept(folder, key(batch_size=4))

    # THEN the two that were used the longest ago are gone; nothing else
    left = {path.name for path in folder.iterdir()}
    assert len(left) == MOST_ENTRIES + 1
    assert {oldest.name, newest.name, "notes.txt"} <= left
    assert not {f"{number:032x}.json" for number in (0, 1)} & left


@pytest.mark.parametrize("off", ["", "0", "off", "OFF", "none", " no "])
def test_the_variable_turns_the_cache_off(off: str) -> None:
    assert cache_folder({CACHE_VARIABLE: off}) is None


def test_the_variable_moves_the_cache_which_is_the_users_own_otherwise(folder: Path) -> None:
    assert cache_folder({CACHE_VARIABLE: str(folder)}) == folder
    assert "autotune-loader" in str(cache_folder({}))


@pytest.mark.parametrize(
    ("cut_short", "had", "wants", "enough"),
    [
        (False, {"budget_s": 5.0}, {"budget_s": 60.0}, True),
        (True, {"budget_s": 5.0}, {"budget_s": 60.0}, False),
        (True, {"budget_s": 60.0}, {"budget_s": 60.0}, True),
        (True, {"budget_s": 60.0, "max_trials": 3}, {"budget_s": 60.0}, False),
        (True, {"budget_s": 60.0, "max_trials": 3}, {"budget_s": 60.0, "max_trials": 2}, True),
        (True, {"budget_s": 60.0}, {"budget_s": 60.0, "max_trials": 2}, True),
    ],
)
def test_a_search_that_was_cut_short_is_not_enough_for_a_caller_who_grants_more(
    cut_short: bool, had: dict[str, Any], wants: dict[str, Any], enough: bool, folder: Path
) -> None:
    keep(key(), a_result(), cut_short=cut_short, **had)
    found = find(key())
    assert found is not None
    assert found.spent.is_enough_for(**wants) is enough


# What was best for the data of a job, as the next AutoLoader finds it


def job(samples: int, batch_size: int) -> str:
    return job_key(DataSide.from_loader(DataLoader(rows(samples), batch_size=batch_size)), HERE)


@pytest.mark.parametrize(("samples", "batch_size", "known"), [(10, 2, BEST), (11, 2, None), (10, 5, None)])
def test_what_was_best_is_known_to_the_next_loader_of_the_same_data(
    samples: int, batch_size: int, known: LoaderConfig | None
) -> None:
    remember(job(10, 2), BEST)
    assert recall(job(samples, batch_size)) == known


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": "1.0", "config": {"num_workers": -1}}'])
def test_what_cannot_be_used_is_ignored_with_a_line_in_the_log(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # GIVEN a file that holds nothing that can be used
    remember("0" * 32, BEST)
    (folder.parent / "jobs" / f"{'0' * 32}.json").write_text(text)
    # WHEN the job is asked for THEN nothing is known of it, and the log says why
    with caplog.at_level(logging.WARNING):
        assert recall("0" * 32) is None
    assert "is ignored" in caplog.text


def test_without_a_cache_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    remember("0" * 32, BEST)
    kept(folder)
    assert recall("0" * 32) is None
    assert find(key()) is None
    assert not list(folder.parent.iterdir())
