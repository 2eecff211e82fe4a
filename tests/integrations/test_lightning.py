from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from autotune_loader.integrations.lightning import tuned
from autotune_loader.values.config import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, Classifier, Waiting, assert_changed

lightning = pytest.importorskip("lightning.pytorch")
# Lightning warns about small machines and short runs, which is what a test is.
pytestmark = [
    pytest.mark.timeout(300),  # its import takes most of it on a busy machine
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]
CONFIG = LoaderConfig(num_workers=2, prefetch_factor=4)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(*batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(lightning.LightningDataModule):
    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset, self.ready = dataset, False

    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> Any:
        assert self.ready
        return DataLoader(self.dataset, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=64)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """Trains, and returns the trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit(model: Module, *data: Any, epochs: int = 2, **options: Any) -> Any:
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, *data, **options)
        return trainer

    return fit


def test_a_data_module_is_tuned_before_the_first_epoch(fit: Callable[..., Any], few: Waiting, quick: Any) -> None:
    model = Module()
    data = tuned(model, Points(few), **quick)

    trainer = fit(model, datamodule=data)

    # THEN the loader in use has the tuned configuration, and only fitting has trained and validated the model
    assert trainer.train_dataloader.num_workers == data.result.best.num_workers
    assert trainer.train_dataloader.batch_size == 32
    assert (trainer.global_step, len(model.model.seen)) == (2 * 8, 2 * (256 + 256))


def test_a_configuration_from_a_file_needs_no_tuning(fit: Callable[..., Any], few: Waiting) -> None:
    model = Module()
    data = tuned(model, DataLoader(few, batch_size=64, shuffle=True), config=CONFIG)

    trainer = fit(model, datamodule=data)

    assert LoaderConfig.from_loader(trainer.train_dataloader) == CONFIG
    assert data.result is None
    assert trainer.global_step == 2 * 4


def test_an_autoloader_changes_in_the_midst_of_training(fit: Callable[..., Any]) -> None:
    model, loader = Module(), AutoLoader(Waiting(), batch_size=BATCH, shuffle=True)

    assert fit(model, loader, epochs=EPOCHS).train_dataloader is loader

    assert_changed(loader, model.model.seen)
