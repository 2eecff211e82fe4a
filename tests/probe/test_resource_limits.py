"""Limits of the machine, made small in a process of their own: /dev/shm and descriptors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import PreloadedPython

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
# Two workers with two batches of 8 MiB each cannot be held by 16 MiB of shared memory; containers have little. Batches that
# are kept hold a descriptor for each of their tensors.
BURST = """
import resource, sys
import torch
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ALONE, TWO_WORKERS, measured, opened, workload

KEPT = []

def apart(samples):
    return [sample.clone() for sample in samples]

def keep(model, batch):
    KEPT.append(batch)

if sys.argv[1] == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    what = workload(torch.zeros(256, 4), collate_fn=apart, training=TrainingSide(train_step=keep))
else:
    what = workload(torch.zeros(1 << 19).expand(256, -1))
with opened(what) as probe:
    failure = probe.probe.burst(TWO_WORKERS, BurstPlan(max_s=2.0, min_s=2.0, relative_error=0.0001, deadline_s=10.0))
    print(failure.kind, failure.message)
    if failure.kind == "shared_memory":
        measured(probe.probe, ALONE)
"""


def small_shm(megabytes: int) -> list[str]:
    mount = f'mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec "$@"'
    return ["unshare", "-m", "sh", "-c", mount, "sh"]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*small_shm(1), "true"], capture_output=True, timeout=20).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting a small /dev/shm (unshare -m) is not permitted here")
def test_full_shared_memory_is_named_and_the_fix_is_given() -> None:
    done = subprocess.run(
        [*small_shm(16), sys.executable, "-c", BURST, "shared memory"],
        capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shared_memory")
    assert "--shm-size" in done.stdout


def test_too_few_descriptors_are_named(tmp_path: Path, preloaded: PreloadedPython) -> None:
    (tmp_path / "burst.py").write_text(BURST)
    run = preloaded.start("burst.py", "descriptors", folder=tmp_path)

    assert run.wait(timeout=90) == 0, run.output
    assert run.output.startswith("descriptors")
    assert "ulimit -n" in run.output
