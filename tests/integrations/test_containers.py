"""A container of docker's has 64 MiB of /dev/shm: here it is mounted so for one process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system
MOUNTED = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
SMALL = ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED, "sh")
SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset
from autotune_loader import AutoLoader

class Large(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((32 << 20,), index, dtype=torch.uint8)

print([batch[0, -1].item() for batch in {}(Large(), num_workers=2)])
"""


def in_a_small_container(*command):
    return subprocess.run([*SMALL, *command], capture_output=True, text=True, timeout=100)


def test_batches_that_do_not_fit_into_shared_memory_for_dataloader_travel_with_autoloader():
    if in_a_small_container("true").returncode:
        pytest.skip("nothing may be mounted here")
    theirs, ours = (
        in_a_small_container(sys.executable, "-c", SCRIPT.format(kind))
        for kind in ("DataLoader", "AutoLoader")
    )
    assert (theirs.returncode, ours.stdout.strip()) == (1, str(list(range(8))))
