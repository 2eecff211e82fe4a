"""What this process may use, on machines played by a root directory of our own and on this one; GPUs; differences."""

import multiprocessing
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from autotune_loader.machine.facts import Fingerprint, differences, inspect_machine
from autotune_loader.machine.limits import open_files_limit
from autotune_loader.machine.processes import host_busy_s


@pytest.fixture
def inspect(tmp_path, monkeypatch):
    """Looks at a machine with 8 CPUs and 1000 bytes of memory, these lines in `/proc/self/cgroup` and these files."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=900, total=1000)
    )

    def look(groups="0::/\n", files=(), environ=()):
        written = {f"sys/fs/cgroup/{name}": text for name, text in dict(files).items()}
        for name, text in (written | {"proc/self/cgroup": groups}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return inspect_machine(root=tmp_path, environ=dict(environ))

    return look


PODS = {
    "pods/pod7/app/cpu.max": "max 100000\n",
    "pods/pod7/cpu.max": "250000",  # of a period that is not named
    "pods/cpu.max": "50000 100000",
}
OWN_PART = {"inner/cpu.max": "300000 100000", "cpu.max": "50000 100000"}
BROKEN = {"a/cpu.max": "100 0", "cpu.max": "garbage", "memory.max": "a b c"}


@pytest.mark.parametrize(
    ("groups", "files", "quotas"),
    [
        ("0::/pods/pod7/app\n", PODS, [2.5, 0.5]),  # less than one core still leaves one
        ("0::/../sibling\n", {"cpu.max": "350000 100000"}, [3.5]),  # entered from outside
        (
            "4:memory:/docker/3f2a\n0::/docker/3f2a/inner\n",
            OWN_PART,
            [3.0, 0.5],
        ),  # sees its own part only
        ("0::/a\nnonsense\n", BROKEN, []),  # broken files
    ],
)
def test_every_quota_above_this_process_counts_and_the_least_binds(groups, files, quotas, inspect):
    cores = inspect(groups, files, {"SLURM_CPUS_PER_TASK": "6"}).cores
    assert [limit.value for limit in cores.inputs] == [8, 8, 6, *quotas]
    assert all(Path(limit.source).is_file() for limit in cores.inputs[3:])
    assert (cores.binding.value, cores.usable) == (
        min([6, *quotas]),
        max(1, int(min([6, *quotas]))),
    )


@pytest.mark.parametrize(
    ("environ", "usable"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
        ({"LOCAL_WORLD_SIZE": "nonsense"}, 8),
        # one SLURM task starts all four ranks with torchrun: they share what the task has
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS_PER_NODE": "1"}, 2),
        # every rank is a SLURM task of its own: what a task has is a rank's
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}, 2),
    ],
)
def test_cores_are_divided_among_the_ranks_that_share_them(environ, usable, inspect):
    assert inspect(environ=environ).usable_cores == usable


def test_affinity_and_pythons_own_count_bind_and_a_daemonic_process_has_no_workers(
    inspect, monkeypatch
):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    assert inspect().usable_cores == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 5})
    assert (inspect().usable_cores, inspect().why_no_workers) == (2, None)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert "cannot start worker processes" in inspect().why_no_workers


V2_MEMORY = {
    # 100 bytes allowed, 80 used of which 30 are cache that the kernel would drop, and a parent with less left
    "pod/app/memory.max": "100", "pod/app/memory.current": "80", "pod/app/memory.stat": "anon 50\ninactive_file 30\n",
    "pod/memory.max": "200", "pod/memory.high": "190", "pod/memory.current": "180",
    "pod/memory.stat": "inactive_file 0\n", "memory.max": "max\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "files", "left", "total"),
    [
        ("0::/pod/app\n", V2_MEMORY, [900, 50, 20, 10], 100),
        ("0::/\n", {"memory.max": "garbage", "memory.stat": "a b c"}, [900], 1000),
    ],
)
def test_memory_is_what_anyone_leaves_at_least_and_ranks_share_it(
    groups, files, left, total, inspect
):
    machine = inspect(groups, files, {"LOCAL_WORLD_SIZE": "4"})
    assert [limit.value for limit in machine.memory.inputs] == left
    assert (machine.memory.available_bytes, machine.memory.total_bytes) == (min(left), total)
    assert machine.memory_budget_bytes == min(left) // 4
    # AND what files can stay in memory from epoch to epoch goes by the whole
    assert (machine.holds(total * 3 // 5), machine.holds(total * 9 // 10)) == (True, False)


def test_what_a_system_does_not_tell_is_none(inspect, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    monkeypatch.setattr(psutil, "cpu_times", Mock(side_effect=FileNotFoundError("/proc/stat")))
    machine = inspect()
    assert (machine.usable_cores, machine.memory_budget_bytes, machine.shm, host_busy_s()) == (
        8,
        None,
        None,
        [],
    )


def test_this_machine_has_what_the_system_says_and_the_same_fingerprint_twice():
    machine, again = (inspect_machine(environ={}) for _ in "ab")
    assert machine.fingerprint(dataset="d") == again.fingerprint(dataset="d")
    assert 0 <= machine.shm.free_bytes <= machine.shm.total_bytes
    assert open_files_limit() in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)
    # AND of its CPUs those count that were asked for, which have been busy since boot
    whole, (one,) = host_busy_s(), host_busy_s({0})
    assert 0 < one == pytest.approx(whole[0], abs=1.0)


@pytest.mark.process
def test_inspecting_settles_nothing_and_another_system_is_told_at_once_what_works_there():
    script = (
        "import sys, multiprocessing; from autotune_loader.machine.facts import inspect_machine;"
        "before = 'torch' in sys.modules; inspect_machine().fingerprint(); assert before == ('torch' in sys.modules);"
        "multiprocessing.set_start_method('spawn');"
        "import torch; sys.platform = 'darwin'; from autotune_loader import load_config, LoaderConfig, AutoLoader"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr
    assert "PlatformError: AutoLoader works on Linux only, and this is 'darwin'" in told
    assert "load_config()" in told


@pytest.mark.parametrize(
    ("count", "is_open", "gpu"),
    [(0, False, "none"), (2, False, None), (2, True, "NVIDIA H100")],
    ids=str,
)
def test_a_gpu_is_named_where_it_is_open_or_was_measured_on_and_cuda_is_not_opened(
    count, is_open, gpu, monkeypatch
):
    name = (
        Mock(return_value="NVIDIA H100")
        if is_open
        else Mock(side_effect=AssertionError("CUDA was opened"))
    )
    told = {
        "device_count": lambda: count,
        "is_initialized": lambda: is_open,
        "get_device_name": name,
    }
    for function, answer in told.items():
        monkeypatch.setattr(torch.cuda, function, answer)
    machine = inspect_machine(environ={})
    assert (machine.fingerprint().gpu, machine.fingerprint(gpu="NVIDIA T4").gpu) == (
        gpu,
        "NVIDIA T4",
    )
    monkeypatch.delitem(sys.modules, "torch")
    assert machine.fingerprint().gpu is None


TUNED = Fingerprint(
    usable_cores=16,
    memory_bytes=64 << 30,
    shm_bytes=8 << 30,
    gpu="NVIDIA H100",
    dataset="Images[1000]",
)


@pytest.mark.parametrize(
    ("here", "told", "matters"),
    [
        ({"usable_cores": 32}, "16 then, 32 here; more workers may be faster", False),
        ({"usable_cores": 8}, "16 then, 8 here; its workers may be too many", True),
        (
            {"memory_bytes": 16 << 30},
            "65536 MiB then, 16384 MiB here; its workers may not fit",
            True,
        ),
        ({"shm_bytes": 16 << 30}, "8192 MiB then, 16384 MiB here", False),
        (
            {"gpu": "none"},
            "GPU: NVIDIA H100 then, none here; the step takes a different time",
            True,
        ),
        ({"dataset": "Images[2000]"}, "Images[1000] then, Images[2000] here", True),
        # not known, the same, hardly different
        ({"gpu": None, "memory_bytes": None, "dataset": "", "torch": "2.7.1"}, None, None),
        ({"shm_bytes": (8 << 30) - (100 << 20)}, None, None),
    ],
    ids=str,
)
def test_a_difference_is_told_with_both_values_and_whether_it_matters(here, told, matters):
    found = differences(TUNED, replace(TUNED, **here))
    assert [each.matters for each in found] == ([] if told is None else [matters])
    assert all((told or "") in each.sentence for each in found)
