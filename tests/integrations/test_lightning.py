from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader.integrations.lightning import tuned
from autotune_loader.values.config import LoaderConfig

lightning = pytest.importorskip("lightning.pytorch")
# Lightning warns about small machines and short runs, which is what a test is.
pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.trained = self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PointsModule(lightning.LightningDataModule):
    def __init__(self, points: Any) -> None:
        super().__init__()
        self.points, self.ready = points, False

    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> Any:
        assert self.ready
        return DataLoader(self.points, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.points, batch_size=64)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
    )  # fmt: skip


def test_a_data_module_is_tuned_before_the_first_epoch(trainer: Any, points: Any, quick: Any) -> None:
    model = Classifier()
    data = tuned(model, PointsModule(points), **quick)

    trainer.fit(model, datamodule=data)

    # THEN the loader in use has the tuned configuration, and only fitting has trained and validated the model
    assert data.result is not None
    assert trainer.train_dataloader.num_workers == data.result.best.num_workers
    assert trainer.train_dataloader.batch_size == 32
    assert (model.trained, model.validated) == (2 * 8, 2 * 4)


def test_a_configuration_from_a_file_needs_no_tuning(trainer: Any, points: Any) -> None:
    model, config = Classifier(), LoaderConfig(num_workers=2, prefetch_factor=4)
    data = tuned(model, DataLoader(points, batch_size=64, shuffle=True), config=config)

    trainer.fit(model, datamodule=data)

    assert LoaderConfig.from_loader(trainer.train_dataloader) == config
    assert data.result is None
    assert model.trained == 2 * 4
