"""How many ranks share a node, by what each launcher leaves in the environment, and how many cores
each has then."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from autotune_loader.machine.limits import local_world_size, usable_cores


def step(nodes, tasks):
    """What SLURM leaves in a process of `srun`."""
    of_step = {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_TASKS_PER_NODE": tasks}
    return {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", **of_step}


RANK = {"LOCAL_RANK": "0", "WORLD_SIZE": "8"}
LIGHTNING = {**RANK, "MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0"}
ONE_TASK, TWO_NODES, UNEVEN = step(1, "1"), step(2, "4(x2)"), step(4, "2(x3),1")


@pytest.fixture
def launched(monkeypatch):
    """A process of one rank that sees so many GPUs, perhaps with a process group of ranks."""

    def launch(devices=0, group=None):
        up = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: group is not None,
            get_world_size=lambda: group,
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", up)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    return launch


@pytest.mark.parametrize(("environ", "devices", "group", "ranks"), [
    ({}, 0, None, 1),
    ({}, 8, None, 1),  # one process that sees all GPUs
    ({"WORLD_SIZE": "8", "RANK": "0"}, 8, None, 1),  # nothing has started it as one of several
    # torchrun; its word goes before all others
    ({"LOCAL_WORLD_SIZE": "4", **RANK}, 8, 8, 4),
    ({"LOCAL_WORLD_SIZE": "1", **RANK}, 8, 8, 1),
    ({"LOCAL_WORLD_SIZE": "4", **ONE_TASK}, 0, None, 4),
    ({"LOCAL_WORLD_SIZE": "nonsense"}, 0, None, 1),
    # DeepSpeed, Open MPI, MPICH
    ({"LOCAL_SIZE": "4", **RANK}, 8, None, 4),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 0, None, 2),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 8, 8, 1),  # one a node
    ({"MPI_LOCALNRANKS": "3"}, 0, None, 3),
    # srun
    (TWO_NODES, 0, None, 4),
    (UNEVEN, 0, None, 2),
    ({**UNEVEN, "SLURM_NODEID": "3"}, 0, None, 1),
    ({**step(2, "2,4"), "SLURM_NODEID": "1"}, 0, None, 4),
    ({**TWO_NODES, "SLURM_NODEID": "2"}, 0, None, 4),  # a node that is not told of
    ({"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "4,2(x2)"}, 0, None, 4),
    # a batch script, which is one process however many tasks the job has
    ({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NNODES": "2"}, 0, None, 1),
    # `srun --pty bash`, in which Lightning or mp.spawn starts the ranks
    ({**ONE_TASK, **LIGHTNING}, 0, None, 8),
    (ONE_TASK, 2, 4, 4),
    (step(8, "1(x8)"), 8, 8, 1),  # one task a node
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
])  # fmt: skip
def test_ranks_of_a_node_are_counted(environ, devices, group, ranks, launched):
    launched(devices, group)
    assert local_world_size(environ) == ranks


def test_ranks_are_counted_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert local_world_size({}) == 1
    assert local_world_size(LIGHTNING) == 8


FOUR = {**step(1, "4"), "SLURM_CPUS_ON_NODE": "32"}
MPI = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
OF_SIX = {**FOUR, "SLURM_CPUS_PER_TASK": "6"}


@pytest.mark.parametrize(("environ", "own", "of_parent", "usable", "sharing"), [
    ({}, 64, 64, 64, 1),
    ({}, 16, 64, 16, 1),  # taskset
    # what all ranks may use is divided among them
    ({"LOCAL_WORLD_SIZE": "4"}, 64, 64, 16, 4),
    ({"LOCAL_WORLD_SIZE": "4"}, 16, 16, 4, 4),  # a container's CPUs, or `taskset torchrun`
    ({"LOCAL_WORLD_SIZE": "3"}, 8, 8, 2, 3),
    ({"LOCAL_WORLD_SIZE": "16"}, 8, 8, 1, 16),
    # each is bound to CPUs of its own by mpirun, or two to those of a NUMA node
    (MPI, 8, 64, 8, 4),
    (MPI, 32, 64, 16, 4),
    # srun binds tasks, or does not; a shell may stand between
    (FOUR, 8, 8, 8, 4),
    (FOUR, 32, 32, 8, 4),
    (FOUR, 2, 32, 2, 4),
    # SLURM says what a task has
    (OF_SIX, 32, 32, 6, 1),
    (OF_SIX, 4, 32, 4, 1),
    ({**OF_SIX, "LOCAL_WORLD_SIZE": "2"}, 32, 32, 6, 1),  # fewer ranks than tasks
    ({**OF_SIX, "SLURM_NTASKS_PER_NODE": "1"}, 32, 32, 6, 1),  # `srun -n 4` in a job of one
    # one task starts all four ranks, which share what it has
    ({**ONE_TASK, "SLURM_CPUS_PER_TASK": "8", "LOCAL_WORLD_SIZE": "4"}, 8, 8, 2, 4),
    # a parent that has ended tells nothing
    ({"LOCAL_WORLD_SIZE": "2"}, 4, None, 2, 2),
])  # fmt: skip
def test_a_rank_has_its_share_of_cores(
    environ, own, of_parent, usable, sharing, launched, tmp_path, monkeypatch
):
    def affinity(pid):
        if pid and of_parent is None:
            raise ProcessLookupError
        return set(range(of_parent if pid else own))

    launched()
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "process_cpu_count", lambda: own, raising=False)
    cores = usable_cores(tmp_path, environ)
    assert cores.usable == usable
    assert cores.ranks == sharing
