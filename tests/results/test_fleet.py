from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.results.fleet import add_to_fleet, entry_for, read_entries
from autotune_loader.results.load import load_config
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError


def a_machine(cores: int) -> Machine:
    here = inspect_machine(environ={})
    return replace(here, cores=replace(here.cores, usable=cores), affinity_count=cores)


def a_result(cores: int, *, workers: int | None = None, dataset: str = "images") -> TuningResult:
    return TuningResult(
        best=LoaderConfig(num_workers=cores if workers is None else workers),
        status="complete",
        baseline=LoaderConfig(),
        fingerprint=a_machine(cores).fingerprint(dataset=dataset),
    )


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.json"
    for cores in (16, 64):
        add_to_fleet(path, a_result(cores))
    return path


@pytest.mark.parametrize(("cores", "workers"), [(16, 16), (64, 64), (128, 64), (32, 16)])
def test_a_machine_finds_the_entry_of_its_kind_or_of_the_nearest_smaller(fleet: Path, cores: int, workers: int) -> None:
    # GIVEN a collection with entries for 16 and 64 cores WHEN a machine asks for its own
    entry = entry_for(fleet, a_machine(cores))

    # THEN it gets one whose workers it can feed
    assert entry.dataloader_kwargs["num_workers"] == workers


def test_tuning_again_on_the_same_kind_replaces_its_entry(fleet: Path) -> None:
    # GIVEN a collection WHEN a kind that it has is tuned again
    add_to_fleet(fleet, a_result(16, workers=9))

    # THEN there are still two entries, one of them new
    assert sorted(entry.dataloader_kwargs["num_workers"] for entry in read_entries(fleet)) == [9, 64]


def test_another_dataset_has_an_entry_of_its_own(fleet: Path) -> None:
    # GIVEN a collection WHEN another dataset is tuned on a kind that it has
    add_to_fleet(fleet, a_result(16, workers=2, dataset="text"))

    # THEN each is found by its name, and an unknown one is refused with the known ones
    assert entry_for(fleet, a_machine(16), dataset="text").dataloader_kwargs["num_workers"] == 2
    assert entry_for(fleet, a_machine(16), dataset="images").dataloader_kwargs["num_workers"] == 16
    with pytest.raises(ConfigFileError, match="no entry for dataset='sound'; it has images, text"):
        entry_for(fleet, a_machine(16), dataset="sound")


def test_a_job_loads_a_collection_as_it_loads_a_file(tmp_path: Path) -> None:
    # GIVEN a collection with an entry for this machine and one for a larger one
    path, here = tmp_path / "fleet.json", inspect_machine().usable_cores
    add_to_fleet(path, a_result(here * 4))
    add_to_fleet(path, replace(a_result(here), fingerprint=inspect_machine().fingerprint(dataset="images")))

    # WHEN the job loads it THEN it gets its own, without a warning
    assert load_config(path).num_workers == here


def test_hosts_that_add_at_once_lose_no_entry(tmp_path: Path) -> None:
    # GIVEN eight hosts of different kinds
    path = tmp_path / "fleet.json"
    hosts = [threading.Thread(target=add_to_fleet, args=(path, a_result(cores))) for cores in range(1, 9)]

    # WHEN they add their entries at the same time
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()

    # THEN all are there
    assert sorted(entry.dataloader_kwargs["num_workers"] for entry in read_entries(path)) == list(range(1, 9))


def test_a_result_without_a_fingerprint_cannot_be_found_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fingerprint"):
        add_to_fleet(tmp_path / "fleet.json", replace(a_result(4), fingerprint=None))


def test_an_empty_collection_has_nothing_for_anyone(tmp_path: Path) -> None:
    # GIVEN a collection without entries
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"schema_version": "1.0", "entries": []}))

    # WHEN THEN
    with pytest.raises(ConfigFileError, match="it has nothing"):
        entry_for(path, a_machine(4))
