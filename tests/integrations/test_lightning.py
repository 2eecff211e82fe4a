from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from autotune_loader.integrations.lightning import tuned
from autotune_loader.values.config import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, Waiting, assert_changed

# Lightning warns about small machines and short runs, which is what a test is.
pytestmark = [
    pytest.mark.timeout(300),  # its import takes most of it on a busy machine
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]
CONFIG = LoaderConfig(num_workers=2, prefetch_factor=4)


@pytest.fixture
def parts() -> Any:
    return pytest.importorskip("tests.integrations.lightning_parts")


@pytest.fixture
def fit(parts: Any, tmp_path: Path) -> Callable[..., Any]:
    """Trains, and returns the trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit(model: Any, *data: Any, epochs: int = 2, checkpoint: Any = None, **options: Any) -> Any:
        trainer = parts.lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, *data, ckpt_path=checkpoint, **options)
        return trainer

    return fit


def test_a_data_module_is_tuned_before_the_first_epoch_and_keeps_every_hook(
    fit: Callable[..., Any], parts: Any, few: Waiting, quick: Any, tmp_path: Path
) -> None:
    model, own = parts.Module(), parts.Points(few)
    data = tuned(own, model, **quick)
    assert data is own

    trainer = fit(model, datamodule=data)

    # THEN the loader in use has the tuned configuration, and only fitting has trained and validated the model
    assert trainer.train_dataloader.num_workers == data.tuning_result.best.num_workers
    assert trainer.train_dataloader.batch_size == 32
    assert (trainer.global_step, len(model.model.seen)) == (2 * 8, 2 * (256 + 256))
    # AND the data module is the user's own, also in a checkpoint, from which another run goes on
    assert trainer.datamodule.num_classes == 2
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(model, datamodule=tuned(own, model, config=CONFIG), epochs=3, checkpoint=tmp_path / "last.ckpt")
    assert own.called == parts.HOOKS


def test_a_configuration_from_a_file_needs_no_tuning(fit: Callable[..., Any], parts: Any, few: Waiting) -> None:
    model, loader = parts.Module(), DataLoader(few, batch_size=64, shuffle=True)

    trainer = fit(model, tuned(loader, model, config=CONFIG))

    assert LoaderConfig.from_loader(trainer.train_dataloader) == CONFIG
    assert loader.num_workers == 0
    assert trainer.global_step == 2 * 4


def test_an_autoloader_changes_in_the_midst_of_training(fit: Callable[..., Any], parts: Any) -> None:
    model, loader = parts.Module(), AutoLoader(Waiting(), batch_size=BATCH, shuffle=True)

    assert fit(model, loader, epochs=EPOCHS).train_dataloader is loader

    assert_changed(loader, model.model.seen)
