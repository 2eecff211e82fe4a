"""What `doctor` says of machines played by a root directory of our own, and of this one."""

from __future__ import annotations

import os
from unittest.mock import Mock

import psutil
import pytest

from autotune_loader.cli.doctor import examination
from autotune_loader.machine.facts import inspect_machine

POD = {  # two cores and 2.5 GiB, of which 1 GiB is in use
    "proc/self/cgroup": "0::/pod/app\n",
    "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/pod/memory.max": str(5 << 29),
    "sys/fs/cgroup/pod/memory.current": str(1 << 30),
    "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
    "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
}


@pytest.mark.parametrize(
    ("files", "host_cpus", "environ", "parts"),
    [
        (POD, 64, {}, ["LOW cores:", "2 usable (64 os.cpu_count()", "docker run --cpus", "LOW memory:", "pod/memory.max"]),
        ({}, 64, {"LOCAL_WORLD_SIZE": "32"}, ["LOW cores:", "2 usable, shared by 32 ranks", "start fewer ranks"]),
        ({}, 64, {"SLURM_CPUS_PER_TASK": "2"}, ["LOW cores:", "sbatch --cpus-per-task"]),
        ({}, 64, {"SLURM_CPUS_PER_TASK": "8"}, ["memory:        the system does not tell"]),  # a fair share
        ({}, 2, {}, ["memory:        the system does not tell"]),  # a small host
    ],
)  # fmt: skip
def test_a_low_limit_is_named_with_its_source_and_what_raises_it(
    files, host_cpus, environ, parts, tmp_path, monkeypatch
):
    for name, text in {**files, "dev/shm/.keep": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "cpu_count", lambda: host_cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(host_cpus)))
    monkeypatch.setattr(os, "process_cpu_count", lambda: host_cpus, raising=False)  # Python 3.13
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    told = examination(inspect_machine(root=tmp_path, environ=environ))
    assert [part for part in parts if part not in told] == []
    assert ("LOW cores" in told) == ("Too low: " in told) == ("LOW cores:" in parts)


def test_one_screen_says_all_that_a_bug_report_needs():
    text = examination(inspect_machine())
    names = ("versions", "cores", "memory", "shared memory", "open files", "start method", "GPUs")
    assert [name for name in (*(f"{name}:" for name in names), "torch ") if name not in text] == []
    assert len(text.splitlines()) <= 24
