from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from autotune_loader.integrations.lightning import tuned
from autotune_loader.values.config import LoaderConfig

# Lightning warns about small machines and short runs, which is what a test is.
pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]


@pytest.fixture
def parts() -> Any:
    return pytest.importorskip("integrations.lightning_parts")


@pytest.fixture
def trainer(parts: Any, tmp_path: Path) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return parts.lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
    )  # fmt: skip


def test_a_data_module_is_tuned_before_the_first_epoch(trainer: Any, parts: Any, points: Any, quick: Any) -> None:
    model = parts.Classifier()
    data = tuned(model, parts.PointsModule(points), **quick)

    trainer.fit(model, datamodule=data)

    # THEN the loader in use has the tuned configuration, and only fitting has trained and validated the model
    assert data.result is not None
    assert trainer.train_dataloader.num_workers == data.result.best.num_workers
    assert trainer.train_dataloader.batch_size == 32
    assert (model.trained, model.validated) == (2 * 8, 2 * 4)


def test_a_configuration_from_a_file_needs_no_tuning(trainer: Any, parts: Any, points: Any) -> None:
    model, config = parts.Classifier(), LoaderConfig(num_workers=2, prefetch_factor=4)
    data = tuned(model, DataLoader(points, batch_size=64, shuffle=True), config=config)

    trainer.fit(model, datamodule=data)

    assert LoaderConfig.from_loader(trainer.train_dataloader) == config
    assert data.result is None
    assert model.trained == 2 * 4
