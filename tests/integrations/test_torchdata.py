from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from autotune_loader import AutoLoader, tune
from autotune_loader.integrations.torchdata import for_resume
from autotune_loader.pipeline.build import rebuild
from autotune_loader.values.config import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, SIZE, Waiting, assert_changed

stateful = pytest.importorskip("torchdata.stateful_dataloader")
# torchdata 0.11 calls what torch 2.13 has deprecated.
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]


def test_a_stateful_loader_is_tuned_and_stays_one(few: Waiting, quick: Any) -> None:
    own = stateful.StatefulDataLoader(few, batch_size=32, shuffle=True, snapshot_every_n_steps=5)

    result = tune(own, **quick)
    loader = rebuild(own, result.best)

    assert type(loader) is stateful.StatefulDataLoader
    assert (loader.num_workers, loader.snapshot_every_n_steps) == (result.best.num_workers, 5)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mid_epoch_checkpoint_is_resumed_with_its_own_workers(few: Waiting, workers: int) -> None:
    # GIVEN a checkpoint after three batches, and a configuration that was tuned since
    loader = stateful.StatefulDataLoader(few, batch_size=32, num_workers=workers)
    whole = [x for x, *_ in loader]
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()

    # WHEN it is resumed with what for_resume() gives
    with pytest.warns(UserWarning, match=f"made with num_workers={workers}, not 3"):
        config = for_resume(LoaderConfig(num_workers=3), state)
    resumed = stateful.StatefulDataLoader(few, batch_size=32, **config.to_kwargs())
    resumed.load_state_dict(state)

    # THEN the rest of the epoch comes, batch for batch
    assert config.num_workers == workers
    assert all(torch.equal(a, b) for (a, *_), b in itertools.zip_longest(resumed, whole[3:], fillvalue=(None, None)))
    # AND the same workers need no change
    assert for_resume(config, state) == config


def test_an_autoloader_in_its_place_is_resumed_by_one_after_a_change() -> None:
    plain = stateful.StatefulDataLoader(Waiting(), batch_size=BATCH, shuffle=True)
    first, second = AutoLoader(plain, num_workers=2), AutoLoader(plain)
    assert_changed(first, [index for _ in range(EPOCHS) for batch in first for index in batch[2].tolist()])

    half = [index for batch in itertools.islice(first, SIZE // 2 // BATCH) for index in batch[2].tolist()]
    second.load_state_dict(first.state_dict())
    assert second.config.num_workers == 0  # as asked; what was learnt is tried once workers are proven
    rest = [index for batch in second for index in batch[2].tolist()]

    assert sorted(half + rest) == list(range(SIZE))
