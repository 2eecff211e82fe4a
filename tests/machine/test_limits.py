"""How many ranks share a node, by what each launcher leaves in the environment, and how many cores each has then."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from autotune_loader.machine.limits import local_world_size, usable_cores

LIGHTNING = {
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
    "NODE_RANK": "0",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
TWO_NODES = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
UNEVEN = {"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.fixture
def launched(monkeypatch):
    """A process of one rank that sees so many GPUs, with the process group of so many ranks if there is one."""

    def launch(devices=0, group=None):
        up = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: group is not None,
            get_world_size=lambda: group,
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", up)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    return launch


@pytest.mark.parametrize(
    ("environ", "devices", "group", "ranks"),
    [
        ({}, 0, None, 1),
        ({}, 8, None, 1),  # one process that sees all GPUs
        (
            {"WORLD_SIZE": "8", "RANK": "0"},
            8,
            None,
            1,
        ),  # nothing has started it as one of several here
        # torchrun; its word goes before all others
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 8, 8, 4),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 8, 8, 1),
        ({"LOCAL_WORLD_SIZE": "4", **STEP}, 0, None, 4),
        ({"LOCAL_WORLD_SIZE": "nonsense"}, 0, None, 1),
        # DeepSpeed, Open MPI, MPICH
        ({"LOCAL_SIZE": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, 8, None, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 0, None, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 8, 8, 1),  # one a node
        ({"MPI_LOCALNRANKS": "3"}, 0, None, 3),
        # srun
        ({**STEP, **TWO_NODES}, 0, None, 4),
        ({**STEP, **UNEVEN}, 0, None, 2),
        ({**STEP, **UNEVEN, "SLURM_NODEID": "3"}, 0, None, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}, 0, None, 4),
        # a batch script, which is one process however many tasks the job has
        ({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NNODES": "2"}, 0, None, 1),
        # `srun --pty bash`, in which Lightning or mp.spawn starts the ranks
        ({**STEP, **LIGHTNING}, 0, None, 8),
        (STEP, 2, 4, 4),
        # one task a node over eight nodes
        ({**STEP, "SLURM_STEP_NUM_NODES": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x8)"}, 8, 8, 1),
        # Lightning's launcher: on one node, on two nodes of four GPUs, on CPUs, on CPUs of two nodes
        (LIGHTNING, 8, None, 8),
        (LIGHTNING, 4, None, 4),
        (LIGHTNING, 0, None, 8),
        ({**LIGHTNING, "SLURM_NNODES": "2"}, 0, None, 4),
        # mp.spawn, of which the environment says nothing
        ({}, 8, 4, 4),
        ({}, 4, 8, 4),
        ({}, 0, 3, 3),
        ({"SLURM_NNODES": "2"}, 0, 3, 2),
    ],
)
def test_ranks_of_a_node_are_counted_whoever_has_started_them(
    environ, devices, group, ranks, launched
):
    launched(devices, group)
    assert local_world_size(environ) == ranks


def test_ranks_are_counted_where_nothing_has_imported_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert (local_world_size({}), local_world_size(LIGHTNING)) == (1, 8)


FOUR = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "32"}


@pytest.mark.parametrize(
    ("environ", "own", "of_parent", "usable", "sharing"),
    [
        ({}, 64, 64, 64, 1),
        ({}, 16, 64, 16, 1),  # taskset
        # what all ranks may use is divided among them
        ({"LOCAL_WORLD_SIZE": "4"}, 64, 64, 16, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 16, 4, 4),  # a container's CPUs, or `taskset torchrun`
        # each is bound to CPUs of its own by mpirun, or two to those of a NUMA node
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, 64, 8, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 32, 64, 16, 4),
        # srun binds tasks, or does not; a shell may stand between
        (FOUR, 8, 8, 8, 4),
        (FOUR, 32, 32, 8, 4),
        (FOUR, 2, 32, 2, 4),
        # SLURM says what a task has
        ({**FOUR, "SLURM_CPUS_PER_TASK": "6"}, 32, 32, 6, 1),
        ({**FOUR, "SLURM_CPUS_PER_TASK": "6"}, 4, 32, 4, 1),
        (
            {**FOUR, "SLURM_CPUS_PER_TASK": "6", "SLURM_NTASKS_PER_NODE": "1"},
            32,
            32,
            6,
            1,
        ),  # `srun -n 4` in a job of one
        ({**STEP, "SLURM_CPUS_PER_TASK": "8", "LOCAL_WORLD_SIZE": "4"}, 8, 8, 2, 4),
    ],
)
def test_a_rank_counts_on_its_share_of_the_cores_or_on_those_that_it_is_bound_to(
    environ, own, of_parent, usable, sharing, launched, tmp_path, monkeypatch
):
    launched()
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(of_parent if pid else own)))
    monkeypatch.setattr(os, "process_cpu_count", lambda: own, raising=False)
    cores = usable_cores(tmp_path, environ)
    assert (cores.usable, cores.ranks) == (usable, sharing)


def test_a_parent_that_has_ended_tells_nothing_of_cores(launched, tmp_path, monkeypatch):
    def affinity(pid):
        if pid:
            raise ProcessLookupError
        return {0, 1, 2, 3}

    launched()
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores(tmp_path, {"LOCAL_WORLD_SIZE": "2"}).usable == 2
