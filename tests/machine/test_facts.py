from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.machine.gpus import Gpus
from autotune_loader.values.serialization import from_plain, to_plain
from tests.support import FakeGpu, FakeGpus

TUNED = Fingerprint(
    usable_cores=16,
    memory_bytes=64 << 30,
    shm_bytes=8 << 30,
    gpus=("NVIDIA H100",),
    driver="570.10",
    torch="2.6.0+cu126",
    python="3.11.7",
    start_method="fork",
    thread_env={"OMP_NUM_THREADS": "1"},
    world_size=1,
    platform="Linux-x86_64",
    dataset="Images[1000]",
)

MATTERS: dict[str, tuple[Any, str, str]] = {
    "usable_cores": (4, "16", "4 here"),
    "memory_bytes": (16 << 30, "65536 MiB", "16384 MiB here"),
    "shm_bytes": (64 << 20, "8192 MiB", "64 MiB here"),
    "gpus": (("NVIDIA T4",), "NVIDIA H100", "NVIDIA T4 here"),
    "torch": ("2.7.1", "2.6.0", "2.7.1 here"),
    "start_method": ("spawn", "fork", "spawn here"),
    "thread_env": ({"OMP_NUM_THREADS": "8"}, "OMP_NUM_THREADS=1", "8 here"),
    "world_size": (8, "1 then", "8 here"),
    "platform": ("Darwin-arm64", "Linux-x86_64", "Darwin-arm64 here"),
    "dataset": ("Images[2000]", "Images[1000]", "Images[2000] here"),
}
HARMLESS: dict[str, Any] = {
    "usable_cores": 32,
    "memory_bytes": 128 << 30,
    "shm_bytes": 16 << 30,
    "gpus": ("NVIDIA H100", "NVIDIA H100"),
    "driver": "575.01",
    "torch": "2.6.1+cu124",
    "python": "3.12.1",
}
SILENT: dict[str, Any] = {
    "memory_bytes": (64 << 30) - (100 << 20),
    "shm_bytes": None,
    "start_method": None,
    "dataset": "",
}


@pytest.mark.parametrize("name", MATTERS)
def test_a_difference_that_matters_is_told_with_both_values(name: str) -> None:
    value, then, now = MATTERS[name]
    (difference,) = differences(TUNED, replace(TUNED, **{name: value}))
    assert (difference.field, difference.matters) == (name, True)
    assert then in difference.sentence
    assert now in difference.sentence


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_difference_is_told_but_does_not_matter(name: str) -> None:
    (difference,) = differences(TUNED, replace(TUNED, **{name: HARMLESS[name]}))
    assert (difference.field, difference.matters) == (name, False)


def test_what_is_the_same_or_not_known_or_hardly_differs_is_no_difference() -> None:
    assert differences(TUNED, TUNED) == []
    for name, value in SILENT.items():
        assert differences(TUNED, replace(TUNED, **{name: value})) == []


def test_a_fingerprint_survives_json_and_unknown_keys() -> None:
    text = json.dumps({**to_plain(TUNED), "from_the_future": 1})
    assert from_plain(json.loads(text), Fingerprint) == TUNED


def test_two_looks_at_this_machine_have_the_same_fingerprint() -> None:
    machine = inspect_machine()
    assert machine.usable_cores >= 1
    assert machine.fingerprint(dataset="d") == inspect_machine().fingerprint(dataset="d")


def test_memory_is_shared_among_the_ranks(tmp_path: Path) -> None:
    machine = inspect_machine(root=tmp_path, environ={"LOCAL_WORLD_SIZE": "4"})
    assert machine.memory.available_bytes is not None
    assert machine.memory_budget_bytes == machine.memory.available_bytes // 4


def test_gpus_and_thread_settings_are_in_the_fingerprint(tmp_path: Path) -> None:
    gpus = Gpus(FakeGpus([FakeGpu(uuid="GPU-1", name="Fake")]), environ={})
    machine = inspect_machine(root=tmp_path, environ={"OMP_NUM_THREADS": "2", "HOME": "/root"}, gpus=gpus)
    fingerprint = machine.fingerprint()
    assert (fingerprint.gpus, fingerprint.driver) == (("Fake",), "570.00")
    assert fingerprint.thread_env == {"OMP_NUM_THREADS": "2"}


@pytest.mark.process
def test_inspecting_imports_no_torch_and_settles_no_start_method() -> None:
    script = (
        "import sys, multiprocessing; from autotune_loader.machine.facts import inspect_machine;"
        "before = 'torch' in sys.modules; inspect_machine().fingerprint(); assert before == ('torch' in sys.modules);"
        "multiprocessing.set_start_method('spawn')"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr == ""
