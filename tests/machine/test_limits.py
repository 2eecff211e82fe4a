"""How much this process may use: cores, memory and descriptors; on Linux only."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from autotune_loader.machine import host, limits
from autotune_loader.machine.cgroups import Limit


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 CPUs, all of which the scheduler may use for us."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.delattr(os, "process_cpu_count", raising=False)


def with_quota(root: Path, cpu_max: str) -> Path:
    for name, text in {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": cpu_max}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_input_is_kept_and_the_least_one_binds(tmp_path: Path) -> None:
    cores = limits.usable_cores(with_quota(tmp_path, "350000 100000"), {"SLURM_CPUS_PER_TASK": "6"})
    assert (cores.usable, cores.available, cores.binding.value) == (3, 3.5, 3.5)
    assert sorted(limit.value for limit in cores.inputs) == [3.5, 6, 8, 8]
    # a quota below one core still leaves one
    cores = limits.usable_cores(with_quota(tmp_path, "50000 100000"), {})
    assert (cores.usable, cores.available) == (1, 0.5)


@pytest.mark.parametrize(
    ("name", "count", "usable"),
    [("sched_getaffinity", lambda _pid: {2, 5}, 2), ("process_cpu_count", lambda: 3, 3)],
)
def test_affinity_and_pythons_own_count_bind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, count: object, usable: int
) -> None:
    monkeypatch.setattr(os, name, count, raising=False)
    assert limits.usable_cores(tmp_path, {}).usable == usable


@pytest.mark.parametrize(
    ("environ", "usable"),
    [
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


def test_the_memory_budget_is_the_least_that_anyone_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # GIVEN a host with much memory and a container with little
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900, total=1000))
    monkeypatch.setattr(limits, "memory_available", lambda _root: (Limit(value=40, source="pod"),))
    monkeypatch.setattr(limits, "memory_limits", lambda _root: (Limit(value=90, source="pod"),))
    budget = limits.memory_budget(tmp_path)
    # THEN the container's counts, and both are shown
    assert (budget.available_bytes, budget.total_bytes, len(budget.inputs)) == (40, 90, 2)


def test_what_a_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    monkeypatch.setattr(psutil, "cpu_times", Mock(side_effect=FileNotFoundError("/proc/stat")))
    assert (limits.usable_cores(tmp_path, {}).usable, limits.affinity()) == (8, None)
    assert limits.memory_budget(tmp_path).available_bytes is None
    assert limits.shared_memory(tmp_path) is None
    assert host.host_cpu() is None


def test_shared_memory_and_descriptors_are_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    room = limits.shared_memory(tmp_path)
    assert room is not None
    assert 0 <= room.free_bytes <= room.total_bytes
    assert limits.open_files_limit() in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)


def test_only_the_cpus_asked_for_count() -> None:
    whole, one = host.host_cpu(), host.host_cpu({0})
    # THEN both have been busy since boot, the one less than all
    assert whole is not None
    assert one is not None
    assert one.cpus == 1 <= whole.cpus
    assert 0 < one.busy_s <= whole.busy_s


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_what_works_there(platform: str) -> None:
    with pytest.raises(ImportError, match=rf"tune works on Linux only, and this is '{platform}'.*load_config\(\)"):
        host.require_linux("autotune_loader.tune", platform)


@pytest.mark.process
def test_importing_what_tunes_says_so_at_once_and_the_rest_can_be_imported() -> None:
    script = "import sys; sys.platform = 'darwin'; from autotune_loader import load_config, LoaderConfig, AutoLoader"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "PlatformError: AutoLoader works on Linux only" in done.stderr
