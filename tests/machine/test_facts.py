"""What this process may use, on machines played by a root directory of our own and on this one;
GPUs; differences."""

import importlib
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
from autotune_loader.machine.limits import SharedMemory, open_files_limit
from autotune_loader.machine.processes import host_busy_s
from autotune_loader.values import PlatformError


@pytest.fixture
def inspect(tmp_path, monkeypatch):
    """Looks at a machine with 8 CPUs and 1000 bytes of memory, with these lines in
    `/proc/self/cgroup` and these files."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    of_host = SimpleNamespace(available=900, total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: of_host)

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


@pytest.mark.parametrize(("groups", "files", "quotas"), [
    ("0::/pods/pod7/app\n", PODS, [2.5, 0.5]),  # less than one core still leaves one
    ("0::/../sibling\n", {"cpu.max": "350000 100000"}, [3.5]),  # entered from outside
    ("4:memory:/docker/3f2a\n0::/docker/3f2a/inner\n", OWN_PART, [3.0, 0.5]),  # sees its own part
    ("0::/a\nnonsense\n", BROKEN, []),
])  # fmt: skip
def test_the_least_quota_above_this_process_binds(groups, files, quotas, inspect):
    cores = inspect(groups, files, {"SLURM_CPUS_PER_TASK": "6"}).cores
    assert [limit.value for limit in cores.inputs] == [8, 8, 6, *quotas]
    assert all(Path(limit.source).is_file() for limit in cores.inputs[3:])
    assert cores.binding.value == min([6, *quotas])
    assert cores.usable == max(1, int(min([6, *quotas])))


def test_affinity_and_pythons_own_count_bind(inspect, monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    assert inspect().usable_cores == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 5})
    assert inspect().usable_cores == 2


def test_a_daemonic_process_has_no_workers(inspect, monkeypatch):
    assert inspect().why_no_workers is None
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert "cannot start worker processes" in inspect().why_no_workers


V2_MEMORY = {
    # 100 bytes allowed, 80 used of which 30 are cache that the kernel would drop, and a parent
    # with less left
    "pod/app/memory.max": "100", "pod/app/memory.current": "80",
    "pod/app/memory.stat": "anon 50\ninactive_file 30\n",
    "pod/memory.max": "200", "pod/memory.high": "190", "pod/memory.current": "180",
    "pod/memory.stat": "inactive_file 0\n", "memory.max": "max\n",
}  # fmt: skip

FULL = {  # more in use than is allowed, and more cache than use
    "pod/memory.max": "100", "pod/memory.current": "120",
    "memory.max": "200", "memory.current": "10", "memory.stat": "inactive_file 30\n",
}  # fmt: skip


@pytest.mark.parametrize(("groups", "files", "left", "total"), [
    ("0::/pod/app\n", V2_MEMORY, [900, 50, 20, 10], 100),
    ("0::/pod\n", FULL, [900, 0, 200], 100),
    ("0::/\n", {"memory.max": "garbage", "memory.stat": "a b c"}, [900], 1000),
])  # fmt: skip
def test_memory_is_the_least_that_is_left(groups, files, left, total, inspect):
    machine = inspect(groups, files)
    assert [limit.value for limit in machine.memory.inputs] == left
    assert machine.memory.available_bytes == min(left)
    assert machine.memory.total_bytes == total
    # AND what files can stay in memory from epoch to epoch goes by the whole
    assert machine.holds(total * 4 // 5)
    assert not machine.holds(total * 4 // 5 + 1)


def test_ranks_share_memory_and_shared_memory(inspect):
    machine = inspect(environ={"LOCAL_WORLD_SIZE": "4"})
    assert machine.memory_budget_bytes == 900 // 4
    assert replace(machine, shm=SharedMemory(800, 1000)).shm_budget_bytes == 800 // 4


def test_what_a_system_does_not_tell_is_none(inspect, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    monkeypatch.setattr(psutil, "cpu_times", Mock(side_effect=FileNotFoundError("/proc/stat")))
    machine = inspect()
    assert machine.usable_cores == 8
    assert machine.memory_budget_bytes is None
    assert machine.holds(1) is None
    assert machine.shm is None
    assert machine.shm_budget_bytes is None
    assert host_busy_s() == []
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert inspect().usable_cores == 1


def test_this_machine_has_what_the_system_says():
    machine, again = (inspect_machine(environ={}) for _ in "ab")
    assert machine.fingerprint(dataset="d") == again.fingerprint(dataset="d")
    assert 0 <= machine.shm.free_bytes <= machine.shm.total_bytes
    assert open_files_limit() in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)
    # AND of its CPUs those count that were asked for, which have been busy since boot
    whole, (one,) = host_busy_s(), host_busy_s({0})
    assert 0 < one == pytest.approx(whole[0], abs=1.0)


INSPECTING = """
import multiprocessing, sys
from autotune_loader.machine.facts import inspect_machine
inspect_machine().fingerprint()
assert "torch" not in sys.modules
multiprocessing.set_start_method("spawn")
sys.platform = "darwin"
from autotune_loader import LoaderConfig, load_config
"""


@pytest.mark.process
def test_inspecting_imports_and_settles_nothing():
    # AND what reads results can be imported on another system
    subprocess.run([sys.executable, "-c", INSPECTING], check=True)


def test_another_system_is_told_what_works(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delitem(sys.modules, "autotune_loader.autoloader.loader", raising=False)
    with pytest.raises(PlatformError, match=r"AutoLoader works on Linux only.*load_config\(\)"):
        importlib.import_module("autotune_loader.autoloader.loader")


@pytest.mark.parametrize(("count", "is_open", "gpu"), [
    (0, False, "none"), (2, False, None), (2, True, "NVIDIA H100"),
])  # fmt: skip
def test_a_gpu_is_named_and_not_opened(count, is_open, gpu, monkeypatch):
    opens = None if is_open else AssertionError("CUDA was opened")
    name = Mock(return_value="NVIDIA H100", side_effect=opens)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_open)
    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    machine = inspect_machine(environ={})
    assert machine.fingerprint().gpu == gpu
    assert machine.fingerprint(gpu="NVIDIA T4").gpu == "NVIDIA T4"
    monkeypatch.delitem(sys.modules, "torch")
    assert machine.fingerprint().gpu is None


TUNED = Fingerprint(
    usable_cores=16,
    memory_bytes=64 << 30,
    shm_bytes=8000 << 20,
    gpu="NVIDIA H100",
    dataset="Images[1000]",
)
GPU = "GPU: NVIDIA H100 then, none here; the step takes a different time"
MEMORY = "memory: 65536 MiB then, 1 MiB here; its workers may not fit"
DATASET = "dataset: Images[1000] then, Images[2000] here; a sample takes a different time"


@pytest.mark.parametrize(("here", "told", "matters"), [
    ({"usable_cores": 32}, "usable cores: 16 then, 32 here; more workers may be faster", False),
    ({"usable_cores": 8}, "usable cores: 16 then, 8 here; its workers may be too many", True),
    ({"memory_bytes": 1 << 20}, MEMORY, True),
    ({"shm_bytes": 16 << 30}, "shared memory: 8000 MiB then, 16384 MiB here", False),
    ({"gpu": "none"}, GPU, True),
    ({"dataset": "Images[2000]"}, DATASET, True),
    # not known, the same, hardly different
    ({"gpu": None, "memory_bytes": None, "dataset": "", "torch": "2.7.1"}, None, None),
    ({"memory_bytes": (64 << 30) * 19 // 20 + 1, "shm_bytes": 8400 << 20}, None, None),
], ids=str)  # fmt: skip
def test_a_difference_is_told_with_both_values(here, told, matters):
    found = differences(TUNED, replace(TUNED, **here))
    assert found == ([] if told is None else [(told, matters)])
