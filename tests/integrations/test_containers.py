"""A container of docker's has 64 MiB of /dev/shm: here it is mounted so for one process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system
SMALL = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"',
    "sh",
]
SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset
from autotune_loader import AutoLoader

class Large(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((32 << 20,), index, dtype=torch.uint8)

print([batch[0, -1].item() for batch in {}(Large(), num_workers=2)])
"""


@pytest.fixture(scope="module")
def small():
    if subprocess.run([*SMALL, "true"], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    return lambda kind: subprocess.run(
        [*SMALL, sys.executable, "-c", SCRIPT.format(kind)], capture_output=True, text=True, timeout=100
    )


def test_batches_that_do_not_fit_into_shared_memory_for_dataloader_travel_with_autoloader(small):
    assert small("DataLoader").returncode == 1
    assert small("AutoLoader").stdout.strip() == str(list(range(12)))
