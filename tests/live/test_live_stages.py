"""`AutoLoader(stages=True)` tells where a sample's time goes in its workers; otherwise nobody watches them."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import AutoLoader
from autotune_loader.values.stages import StageSamples


class Photos(Dataset[Any]):
    """6 ms of computing and 3 ms of waiting."""

    def __len__(self) -> int:
        return 4096

    def unpack(self) -> None:
        end = time.thread_time() + 0.006
        while time.thread_time() < end:
            pass

    def fetch(self) -> None:
        time.sleep(0.003)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetch()
        self.unpack()
        return torch.full((4,), float(index))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_the_report_of_a_watched_training_names_its_stages() -> None:
    loader = AutoLoader(Photos(), batch_size=4, num_workers=1, tune=False, stages=True)
    begun = time.monotonic()
    for batch in loader:
        assert batch.shape == (4, 4)
        if time.monotonic() - begun > 6:
            break
    assert "unpack" in loader.report()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_nobody_watches_unless_asked() -> None:
    loader = AutoLoader(Photos(), batch_size=4, num_workers=1, tune=False)
    for number, _ in enumerate(loader):
        if number > 40:
            break
    assert "unpack" not in loader.report()


def test_a_copy_watches_as_well_and_begins_anew() -> None:
    loader = AutoLoader(Photos(), batch_size=4, num_workers=1, stages=True)
    assert loader._state.stages is not None
    loader._state.stages.append(
        StageSamples(seen=(), samples=1.0, wall_s=1.0, cpu_s=1.0, crowded_s=0.0, queue_cpu_s=0.0)
    )
    again = copy.copy(loader)
    assert again._state.stages is not None
    assert not again._state.stages
