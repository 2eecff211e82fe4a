from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune_loader.integrations.accelerate import dispatches, tune_before_prepare

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.system


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.fixture
def accelerator() -> Any:
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loader_is_tuned_before_prepare_and_then_trained_with(accelerator: Any, points: Any, quick: Any) -> None:
    # GIVEN a training script with Accelerate
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # WHEN the loader is tuned before it is prepared
    loader, result = tune_before_prepare(accelerator, DataLoader(points, batch_size=32, shuffle=True), model, **quick)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # THEN the prepared loader has the tuned workers, and an epoch trains
    assert loader.num_workers == result.best.num_workers
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 8
    assert sum(losses[4:]) < sum(losses[:4])


@pytest.mark.parametrize(
    ("chosen", "stream", "expected"), [(None, True, True), (None, False, False), (True, False, True)]
)
def test_rank_0_loads_for_all_where_accelerate_dispatches(
    chosen: Any, stream: bool, expected: bool, points: Any
) -> None:
    # GIVEN what was chosen and what is read
    class Chosen:
        dispatch_batches = chosen

    # WHEN THEN as Accelerate decides it
    assert dispatches(Chosen(), DataLoader(Stream() if stream else points)) is expected
