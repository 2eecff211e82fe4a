from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from autotune_loader.machine import limits
from autotune_loader.machine.cgroups import Limit


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 CPUs, all of which the scheduler may use for us."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.delattr(os, "process_cpu_count", raising=False)


def with_quota(root: Path, cpu_max: str) -> Path:
    for name, text in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": cpu_max,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.usefixtures("eight_cpus")
def test_every_input_is_kept_and_the_least_one_binds(tmp_path: Path) -> None:
    # GIVEN 8 CPUs, a quota of 3.5 cores and a SLURM task of 6
    root = with_quota(tmp_path, "350000 100000")
    # WHEN the cores are counted
    cores = limits.usable_cores(root, {"SLURM_CPUS_PER_TASK": "6"})
    # THEN the quota binds, and all are shown
    assert (cores.usable, cores.available, cores.binding.value) == (3, 3.5, 3.5)
    assert sorted(limit.value for limit in cores.inputs) == [3.5, 6, 8, 8]


def test_affinity_binds_below_the_cpu_count(eight_cpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 5}, raising=False)
    assert limits.usable_cores(tmp_path, {}).usable == 2


def test_pythons_own_count_binds_where_it_exists(
    eight_cpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    assert limits.usable_cores(tmp_path, {}).usable == 3


def test_a_system_without_affinity_falls_back_on_the_cpu_count(
    eight_cpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert (limits.usable_cores(tmp_path, {}).usable, limits.affinity()) == (8, None)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("environ", "usable"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
        ({"LOCAL_WORLD_SIZE": "nonsense"}, 8),
        ({"LOCAL_WORLD_SIZE": "0"}, 8),
        # one SLURM task starts all four ranks with torchrun: they share what the task has
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS_PER_NODE": "1"}, 2),
        # every rank is a SLURM task of its own: what a task has is a rank's
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}, 2),
    ],
)
def test_cores_are_divided_among_the_ranks_that_share_them(
    tmp_path: Path, environ: dict[str, str], usable: int
) -> None:
    assert limits.usable_cores(tmp_path, environ).usable == usable


@pytest.mark.usefixtures("eight_cpus")
def test_a_quota_below_one_core_still_leaves_one(tmp_path: Path) -> None:
    cores = limits.usable_cores(with_quota(tmp_path, "50000 100000"), {})
    assert (cores.usable, cores.available) == (1, 0.5)


def test_the_memory_budget_is_the_least_that_anyone_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # GIVEN a host with much memory and a container with little
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900, total=1000))
    monkeypatch.setattr(limits, "memory_available", lambda _root: (Limit(value=40, source="pod"),))
    monkeypatch.setattr(limits, "memory_limits", lambda _root: (Limit(value=90, source="pod"),))
    # WHEN the budget is made
    budget = limits.memory_budget(tmp_path)
    # THEN the container's counts, and both are shown
    assert (budget.available_bytes, budget.total_bytes, len(budget.inputs)) == (40, 90, 2)


def test_an_unknown_memory_budget_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    assert limits.memory_budget(tmp_path).available_bytes is None


def test_shared_memory_is_none_where_there_is_no_dev_shm(tmp_path: Path) -> None:
    assert limits.shared_memory(tmp_path) is None


def test_shared_memory_has_room_within_its_size(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    room = limits.shared_memory(tmp_path)
    assert room is not None
    assert 0 <= room.free_bytes <= room.total_bytes


def test_only_thread_variables_that_are_set_are_kept() -> None:
    assert limits.thread_environment({"OMP_NUM_THREADS": "1", "HOME": "/root"}) == {"OMP_NUM_THREADS": "1"}


def test_the_descriptor_limit_is_what_the_system_says() -> None:
    resource = pytest.importorskip("resource")
    assert limits.open_files_limit() in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)
