"""Limits of the machine, made small in a process of their own: /dev/shm and descriptors; and locks held at a fork."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
# Batches of 8 MiB: two workers with two batches each cannot be held by 16 MiB of shared memory; containers have little.
BURST = """
import json, resource, sys, threading
import torch
from torch.utils.data import DataLoader
from autotune_loader.values.config import LoaderConfig
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.payload import Payload
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
import limited

def told(case):
    data, training = limited.data_side(case), TrainingSide(train_step=limited.step(case))
    if case == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    probe = ProcessProbe(Payload.of(Workload(data=data, training=training), 1 << 30), inspect_machine())
    probe.start()
    plan = BurstPlan(max_s=2.0, min_s=2.0, relative_error=0.0001, deadline_s=5.0)
    outcome = probe.burst(LoaderConfig(num_workers=2), plan)
    again = outcome  # what was killed begins anew, as tests of other faults show
    if getattr(outcome, "kind", "") == "shared_memory":
        again = probe.burst(LoaderConfig(), BurstPlan(max_s=0.5, min_s=0.3, deadline_s=5.0))
    probe.close()
    return {"kind": getattr(outcome, "kind", "ok"), "message": getattr(outcome, "message", ""),
            "next": getattr(again, "kind", "ok")}

print(json.dumps({case: told(case) for case in sys.argv[1:]}))
"""


def bursts(*cases: str, small_shm: bool = False) -> dict[str, Any]:
    """What became of each case, in one program that imports torch once."""
    root = str(HERE.parents[1])
    command = [sys.executable, "-c", BURST, *cases]
    if small_shm:
        command = [
            *("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"),
            *command,
        ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(HERE)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True, timeout=20
    )
    return tried.returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting a small /dev/shm (unshare -m) is not permitted here")


@pytest.fixture(scope="module")
def in_small_shm() -> dict[str, Any]:
    return bursts("default_collate", "custom_collate", small_shm=True)


@pytest.fixture(scope="module")
def in_trouble() -> dict[str, Any]:
    return bursts("lock", "collate", "descriptors")


@needs_mount
def test_full_shared_memory_is_named_and_the_fix_is_given(in_small_shm: dict[str, Any]) -> None:
    told = in_small_shm["default_collate"]

    assert told["kind"] == "shared_memory"
    assert "--shm-size" in told["message"]
    assert told["next"] == "ok"


@needs_mount
def test_a_custom_collate_that_hangs_on_full_shared_memory_is_broken_by_the_deadline(
    in_small_shm: dict[str, Any],
) -> None:
    told = in_small_shm["custom_collate"]

    assert told["kind"] in ("deadline", "shared_memory")


@pytest.mark.parametrize(
    ("case", "kind"), [("lock", "deadline"), ("collate", "deadline"), ("descriptors", "descriptors")]
)
def test_a_hang_is_broken_by_the_deadline_and_too_few_descriptors_are_named(
    in_trouble: dict[str, Any], case: str, kind: str
) -> None:
    told = in_trouble[case]

    assert told["kind"] == kind
    assert "ulimit -n" in told["message"] or kind != "descriptors"
