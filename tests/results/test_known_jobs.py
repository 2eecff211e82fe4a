"""What was best for the data of a job, as the next AutoLoader finds it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.results.known_jobs import job_key, recall, remember
from autotune_loader.values.config import LoaderConfig

BEST = LoaderConfig(num_workers=3, prefetch_factor=4)
HERE = inspect_machine().fingerprint()


def key_of(samples: int, **arguments: int) -> str:
    loader = DataLoader(TensorDataset(torch.arange(samples)), **arguments)  # type: ignore[arg-type]
    return job_key(DataSide.from_loader(loader), HERE)


def test_what_was_best_is_known_to_the_next_loader_of_the_same_data() -> None:
    remember(key_of(10, batch_size=2), BEST)
    assert recall(key_of(10, batch_size=2)) == BEST


@pytest.mark.parametrize(("samples", "batch_size"), [(11, 2), (10, 5)])
def test_other_data_or_batches_are_another_job(samples: int, batch_size: int) -> None:
    remember(key_of(10, batch_size=2), BEST)
    assert recall(key_of(samples, batch_size=batch_size)) is None


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": "1.0", "config": {"num_workers": -1}}'])
def test_a_file_that_cannot_be_used_is_ignored_with_a_line_in_the_log(
    text: str, cache_of_its_own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # GIVEN a file that holds nothing that can be used
    remember("0" * 32, BEST)
    (path,) = (cache_of_its_own / "jobs").iterdir()
    path.write_text(text)
    # WHEN the job is asked for
    with caplog.at_level(logging.WARNING):
        known = recall("0" * 32)
    # THEN nothing is known of it, and the log says why
    assert known is None
    assert "is ignored" in caplog.text


def test_without_a_cache_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, cache_of_its_own: Path) -> None:
    monkeypatch.setenv("AUTOTUNE_LOADER_CACHE", "off")
    remember("0" * 32, BEST)
    assert recall("0" * 32) is None
    assert not list(cache_of_its_own.iterdir())
