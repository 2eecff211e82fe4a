"""What `doctor` says inside a container, here played by a root directory of our own, and on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from autotune_loader.cli.doctor import examine, render_checks
from autotune_loader.machine.facts import inspect_machine

V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "32 31 0:29 /docker/x /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
USE = {"memory.current": str(1 << 30), "memory.stat": "inactive_file 0\n"}


def root_with(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {**files, "dev/shm/.keep": ""}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def told(root: Path, monkeypatch: pytest.MonkeyPatch, host_cpus: int = 64, **environ: str) -> str:
    monkeypatch.setattr(os, "cpu_count", lambda: host_cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(host_cpus)))
    monkeypatch.setattr(os, "process_cpu_count", lambda: host_cpus, raising=False)  # Python 3.13
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    return render_checks(examine(inspect_machine(root=root, environ=environ)))


def test_a_pod_is_told_its_quota_its_memory_and_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a pod of two cores and 2.5 GiB, of which 1 GiB is in use, on a host of 64 cores
    pod = {f"sys/fs/cgroup/pod/{name}": text for name, text in USE.items()}
    root = root_with(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/pod/memory.max": str(5 << 29),
            "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
            **pod,
        },
    )
    # WHEN doctor looks at it
    text = told(root, monkeypatch)
    # THEN the numbers are the pod's, each with its file, and each too low one has its fix
    assert "LOW  cores: 2 usable (64 from os.cpu_count(), 64 from os.sched_getaffinity(), " in text
    assert f", 2 from {root}" in text
    assert "allows 2 of the 64 this host has" in text
    assert "resources.limits.cpu" in text
    assert "LOW  memory: 1.5" in text
    assert "pod/memory.max minus use" in text
    assert "docker run --memory" in text


def test_a_container_of_cgroup_v1_is_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = "sys/fs/cgroup/memory"
    root = root_with(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            f"{memory}/memory.limit_in_bytes": str(8 << 30),
            f"{memory}/memory.usage_in_bytes": str(1 << 30),
            f"{memory}/memory.stat": "total_inactive_file 0\n",
        },
    )

    text = told(root, monkeypatch)

    assert "LOW  cores: 1 usable" in text
    assert "cpu.cfs_quota_us allows 1 of the 64 this host has" in text
    assert "ok   memory: 7" in text


def test_no_limits_are_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(root_with(tmp_path, {}), monkeypatch, host_cpus=2)

    assert "ok   cores: 2 usable" in text
    assert "memory: the system does not tell" in text


def test_a_share_of_a_large_host_is_named_but_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(root_with(tmp_path, {}), monkeypatch, SLURM_CPUS_PER_TASK="8")

    assert "ok   cores: 8 usable" in text
    assert "SLURM_CPUS_PER_TASK allows 8 of the 64 this host has" in text


def test_too_many_ranks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = told(root_with(tmp_path, {}), monkeypatch, LOCAL_WORLD_SIZE="32")

    assert "LOW  cores: 2 usable, shared by 32 ranks" in text
    assert "start fewer ranks" in text


def test_doctor_is_right_here() -> None:
    machine = inspect_machine()
    text = render_checks(examine(machine))

    assert machine.usable_cores <= len(os.sched_getaffinity(0))
    assert f"{machine.usable_cores} usable" in text
    assert "/dev/shm (statvfs)" in text
    assert "RLIMIT_NOFILE" in text or "no limit" in text
