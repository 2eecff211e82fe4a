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

from autotune_loader.machine.facts import Fingerprint, differences, inspect_machine, visible_gpu
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


H100, T4 = "NVIDIA H100 80GB HBM3", "Tesla T4"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Plays NVIDIA's driver with these models; torch is not imported."""
    monkeypatch.delitem(sys.modules, "torch")

    def play(*models, device="dev/nvidia0"):
        for number, model in enumerate(models):
            folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{number}8:00.0"
            folder.mkdir(parents=True)
            text = f"Model: \t\t {model}\nIRQ:   \t\t 18\nVideo BIOS: \t 96.00.61.00.01\n"
            (folder / "information").write_text(text)
        (tmp_path / "dev").mkdir()
        (tmp_path / device).touch()
        return tmp_path

    return play


@pytest.mark.parametrize(("models", "environ", "gpu"), [
    ([H100], {}, H100),
    ([H100, H100], {"CUDA_VISIBLE_DEVICES": "1"}, H100),
    ([T4, H100], {}, f"{H100} or {T4}"),
    ([H100], {"CUDA_VISIBLE_DEVICES": ""}, "none"),
    ([H100], {"CUDA_VISIBLE_DEVICES": "-1"}, "none"),
    (["Unknown"], {}, None),
    ([], {}, None),
])  # fmt: skip
def test_the_driver_names_the_gpu(models, environ, gpu, driver):
    assert visible_gpu(root=driver(*models), environ=environ) == gpu


def test_a_container_without_a_gpu_names_none(driver):
    root = driver(H100, device="dev/nvidiactl")
    assert visible_gpu(root=root, environ={}) == "none"
    # AND what another maker's driver has is not known
    (root / "dev" / "kfd").touch()
    assert visible_gpu(root=root, environ={}) is None


def test_a_gpu_that_torch_has_opened_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100)
    assert visible_gpu(root=tmp_path, environ={"CUDA_VISIBLE_DEVICES": ""}) == H100


TUNED = Fingerprint(
    usable_cores=16,
    memory_bytes=64 << 30,
    shm_bytes=8000 << 20,
    gpu=H100,
    dataset="Images[1000]",
    torch="2.6.0+cu124",
)
GPU = f"GPU: {H100} when tuned, {{}} here; the step takes a different time"
MEMORY = "memory: 64 GiB when tuned, 1 MiB here; its workers may not fit"
DATASET = "dataset: Images[1000] when tuned, Images[2000] here; a sample takes a different time"
FEWER = "usable cores: 16 when tuned, 8 here; it may use too many workers"
MORE = "usable cores: 16 when tuned, 32 here; more workers may be faster"
TORCH = "torch: 2.6.0+cu124 when tuned, 2.7.1 here"


@pytest.mark.parametrize(("here", "told", "matters"), [
    ({"usable_cores": 32}, MORE, False),
    ({"usable_cores": 8}, FEWER, True),
    ({"memory_bytes": 1 << 20}, MEMORY, True),
    ({"shm_bytes": 24064 << 20}, "shared memory: 7.81 GiB when tuned, 23.5 GiB here", False),
    ({"gpu": "none"}, GPU.format("none"), True),
    ({"gpu": f"{T4} or NVIDIA A100"}, GPU.format(f"{T4} or NVIDIA A100"), True),
    ({"gpu": f"{H100} or {T4}"}, None, None),
    ({"dataset": "Images[2000]"}, DATASET, True),
    ({"torch": "2.7.1"}, TORCH, False),
    ({"torch": "2.6.0"}, None, None),  # a wheel's own version lacks what it is built for
    # not known, the same, hardly different
    ({"gpu": None, "memory_bytes": None, "dataset": "", "torch": None}, None, None),
    ({"memory_bytes": (64 << 30) * 19 // 20 + 1, "shm_bytes": 8400 << 20}, None, None),
], ids=str)  # fmt: skip
def test_a_difference_is_told_with_both_values(here, told, matters):
    found = differences(TUNED, replace(TUNED, **here))
    assert found == ([] if told is None else [(told, matters)])


def test_those_that_matter_come_first():
    found = differences(TUNED, replace(TUNED, usable_cores=32, gpu=T4, torch="2.7.1"))
    assert [str(each)[:5] for each in found] == ["! GPU", "~ usa", "~ tor"]


@pytest.mark.parametrize("here", [H100, f"{H100} MIG 1g.10gb", f"{H100} MIG 2g.20gb"])
def test_the_driver_does_not_name_a_part(here):
    tuned = replace(TUNED, gpu=f"{H100} MIG 1g.10gb")
    assert bool(differences(tuned, replace(tuned, gpu=here))) == (" MIG 2g" in here)
