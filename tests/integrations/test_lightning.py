import importlib
import logging
import sys

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from autotune_loader import AutoLoader, TuningResult
from autotune_loader.integrations import lightning as integration
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

    def fit(model, *data, epochs=2, checkpoint=None, of_trainer=None, **options):
        trainer = parts.lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
            **of_trainer or {},
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


def test_the_other_name_of_the_package_is_enough(monkeypatch):
    pytest.importorskip("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    assert LoaderConfig.from_loader(tuned(DataLoader(FEW), config=CONFIG)) == CONFIG


def test_an_autoloader_changes_in_the_midst_of_training(fit, parts):
    model, loader = parts.Module(), AutoLoader(Waiting(), batch_size=BATCH, shuffle=True)
    assert fit(model, loader, epochs=EPOCHS).train_dataloader is loader
    assert_changed(loader, model.model.seen)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_batches_that_lightning_overfits_come_from_a_loader_with_the_settings(fit, parts):
    model = parts.Module()
    trainer = fit(
        model,
        datamodule=tuned(parts.Points(FEW), model, config=CONFIG),
        of_trainer={"overfit_batches": 3},
    )
    assert LoaderConfig.from_loader(trainer.train_dataloader) == CONFIG
    assert type(trainer.train_dataloader.sampler) is SequentialSampler


class Fixed(DataLoader):
    """Decides by itself how many workers it has."""

    def __init__(self, dataset, size, **options):
        super().__init__(dataset, size, num_workers=1, **options)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(FEW, batch_size=16, shuffle=True),
        lambda: DataLoader(FEW, 16, num_workers=1, prefetch_factor=3, persistent_workers=True),
        lambda: Fixed(FEW, 16, shuffle=True),
    ],
)
def test_a_loader_that_lightning_makes_anew_has_the_settings(package, make):
    data = importlib.import_module(f"{package}.trainer.connectors.data_connector")
    config = LoaderConfig(num_workers=2, prefetch_factor=4, batch_size=8)
    with data._replace_dunder_methods(DataLoader, "dataset"):
        own = make()
        noted = {name: str(value) for name, value in vars(own).items()}
        loader = TuningResult(best=config, status="complete").apply_to(own)
    anew = data._update_dataloader(loader, SequentialSampler(FEW))
    assert (type(anew), LoaderConfig.from_loader(anew)) == (
        type(own),
        LoaderConfig.from_loader(loader),
    )
    assert (anew.num_workers, anew.prefetch_factor, anew.persistent_workers) == (2, 4, False)
    assert (type(anew.sampler), anew.batch_size, anew.batch_sampler.batch_size) == (
        SequentialSampler,
        8,
        8,
    )
    assert {name: str(value) for name, value in vars(own).items()} == noted


class Several:
    """A data module, as far as matters, with a container of loaders."""

    def __init__(self, contain):
        self.loaders = {"a": DataLoader(FEW, batch_size=64), "b": DataLoader(FEW, batch_size=32)}
        self.contain = contain

    def train_dataloader(self):
        return self.contain(self.loaders)


def as_list(loaders):
    return list(loaders.values())


def combined(loaders):
    return importlib.import_module("lightning.pytorch.utilities").CombinedLoader(
        loaders, "min_size"
    )


@pytest.mark.parametrize(
    ("contain", "place"), [(dict, "['a']"), (as_list, "[0]"), (combined, "[0]")]
)
def test_of_several_loaders_each_is_tuned_and_they_come_back_as_they_were(
    contain, place, monkeypatch
):
    found, given, data = [], [], Several(contain)

    def tune(*args):
        given.append(args)
        found.append(TuningResult(best=LoaderConfig(num_workers=len(given)), status="complete"))
        return found[-1]

    monkeypatch.setattr(integration, "tune", tune)
    tuned(data, torch.nn.Linear(4, 2))
    with pytest.warns(
        UserWarning, match="is one of the loaders whose batches a step takes together"
    ) as told:
        made = data.train_dataloader()
    assert f"train_dataloader(){place}" in [str(each.message).partition(" ")[0] for each in told]
    assert given == [(each,) for each in data.loaders.values()]
    assert data.tuning_result == (dict(zip("ab", found, strict=True)) if contain is dict else found)
    for several in (made, data.train_dataloader()):  # known from now on
        assert type(several) is type(contain(data.loaders))
        inner = several.iterables if contain is combined else several
        loaders = inner if contain is as_list else [inner["a"], inner["b"]]
        assert [(each.num_workers, each.batch_size) for each in loaders] == [(1, 64), (2, 32)]
    assert [each.num_workers for each in data.loaders.values()] == [0, 0]


def test_several_loaders_are_trained_from_with_the_settings(fit, parts):
    model, several = parts.Module(), Several(dict).loaders
    model.training_step = lambda batch: (
        model.model(*batch["a"])["loss"] + model.model(*batch["b"])["loss"]
    )
    loader = fit(model, tuned(several, model, config=CONFIG)).train_dataloader
    assert [LoaderConfig.from_loader(each) for each in loader.values()] == [CONFIG, CONFIG]
