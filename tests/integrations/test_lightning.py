import logging

import pytest
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from autotune_loader.integrations.lightning import tuned
from autotune_loader.values import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, FEW, QUICK, Waiting, assert_changed

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
def parts():
    return pytest.importorskip("tests.integrations.lightning_parts")


@pytest.fixture
def fit(parts, tmp_path):
    """Trains, and returns the trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit(model, *data, epochs=2, checkpoint=None, **options):
        trainer = parts.lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, *data, ckpt_path=checkpoint, **options)
        return trainer

    return fit


def test_a_data_module_is_tuned_before_the_first_epoch_and_keeps_every_hook(fit, parts, tmp_path):
    model, own, checkpoint = parts.Module(), parts.Points(FEW), tmp_path / "last.ckpt"
    data = tuned(own, model, **QUICK)
    assert data is own
    trainer = fit(model, datamodule=data)
    loader = trainer.train_dataloader
    assert (loader.num_workers, loader.batch_size) == (data.tuning_result.best.num_workers, 32)
    assert (trainer.global_step, len(model.model.seen)) == (2 * 8, 2 * (256 + 256))
    assert trainer.datamodule.num_classes == 2
    trainer.save_checkpoint(checkpoint)
    fit(model, datamodule=tuned(own, model, config=CONFIG), epochs=3, checkpoint=checkpoint)
    assert own.called == parts.HOOKS


def test_a_configuration_from_a_file_needs_no_tuning(fit, parts):
    model, loader = parts.Module(), DataLoader(FEW, batch_size=64, shuffle=True)
    trainer = fit(model, tuned(loader, model, config=CONFIG))
    assert LoaderConfig.from_loader(trainer.train_dataloader) == CONFIG
    assert (loader.num_workers, trainer.global_step) == (0, 2 * 4)


def test_an_autoloader_changes_in_the_midst_of_training(fit, parts):
    model, loader = parts.Module(), AutoLoader(Waiting(), batch_size=BATCH, shuffle=True)
    assert fit(model, loader, epochs=EPOCHS).train_dataloader is loader
    assert_changed(loader, model.model.seen)
