import contextlib
import csv
import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

import autotune_loader
from autotune_loader import AutoLoader, TuningResult, enable
from autotune_loader.integrations.lightning import tuned
from autotune_loader.values import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, FEW, Waiting, assert_changed

pytestmark = [
    pytest.mark.system,
    pytest.mark.xdist_group("frameworks"),
    pytest.mark.timeout(300),  # its import takes most of it on a busy machine
    # Lightning warns about small machines and short runs, which is what a test is.
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
    quiet = {**parts.QUIET, "logger": False, "default_root_dir": tmp_path}

    def fit(model, *data, epochs=2, checkpoint=None, of_trainer=(), **options):
        trainer = parts.lightning.Trainer(max_epochs=epochs, **{**quiet, **dict(of_trainer)})
        trainer.fit(model, *data, ckpt_path=checkpoint, **options)
        return trainer

    return fit


@pytest.mark.smoke
@pytest.mark.usefixtures("simulated_bursts")
def test_a_tuned_data_module_keeps_every_hook(fit, parts, tmp_path):
    # GIVEN a module whose every hook is noted
    model, own, checkpoint = parts.Module(), parts.Points(FEW), tmp_path / "last.ckpt"
    data = tuned(own, model, progress=False)
    assert data is own
    # WHEN it is trained from, with no step of validation ahead
    trainer = fit(model, datamodule=data, of_trainer={"num_sanity_val_steps": 0})
    # THEN it was tuned before the first epoch
    loader, best = trainer.train_dataloader, data.tuning_result.best
    assert best.num_workers > 0
    assert LoaderConfig.from_loader(loader) == best
    assert loader.batch_size == 32
    assert trainer.global_step == 2 * 8
    assert len(model.model.seen) == 2 * (256 + 256)
    assert trainer.datamodule.num_classes == 2
    # AND its hooks are called, those of checkpoints, too
    trainer.save_checkpoint(checkpoint)
    fit(model, datamodule=tuned(own, model, config=CONFIG), epochs=3, checkpoint=checkpoint)
    assert own.called == parts.HOOKS


def test_a_configuration_from_a_file_needs_no_tuning(fit, parts):
    model, loader = parts.Module(), DataLoader(FEW, batch_size=64, shuffle=True)
    trainer = fit(model, tuned(loader, model, config=CONFIG))
    assert LoaderConfig.from_loader(trainer.train_dataloader) == CONFIG
    assert loader.num_workers == 0
    assert trainer.global_step == 2 * 4


def test_the_other_name_of_the_package_is_enough(monkeypatch):
    pytest.importorskip("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    assert LoaderConfig.from_loader(tuned(DataLoader(FEW), config=CONFIG)) == CONFIG


def test_an_autoloader_changes_in_the_midst_of_training(fit, parts):
    model, loader = parts.Module(), AutoLoader(Waiting(), batch_size=BATCH, shuffle=True)
    assert fit(model, loader, epochs=EPOCHS).train_dataloader is loader
    assert_changed(loader, model.model.seen)


@pytest.mark.parametrize("made", [AutoLoader, DataLoader])
def test_a_callback_logs_the_loaders_metrics(fit, parts, tmp_path, made):
    """A watched loader's, or an AutoLoader's."""
    from lightning.pytorch.loggers import CSVLogger

    from autotune_loader.integrations.lightning_metrics import LoaderMetrics

    logger, loader = CSVLogger(tmp_path), made(FEW, batch_size=16)
    how = {"callbacks": [LoaderMetrics(every_n_steps=12, prefix="data/")], "logger": logger}
    with enable("watch") if made is DataLoader else contextlib.nullcontext():
        fit(parts.Module(), loader, of_trainer=how)
    written = Path(logger.experiment.metrics_file_path).read_text()
    rows = [*csv.DictReader(written.splitlines())]
    assert [row["step"] for row in rows] == ["12", "24"]
    names = {"wait_s", "wait_share", "samples_per_s", "num_workers"}
    assert {*rows[0]} == {"step", *(f"data/{name}" for name in names)}
    assert all(0 < float(row["data/wait_share"]) <= 1 for row in rows)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_batches_that_lightning_overfits_have_the_settings(fit, parts):
    model = parts.Module()
    data = tuned(parts.Points(FEW), model, config=CONFIG)
    trainer = fit(model, datamodule=data, of_trainer={"overfit_batches": 3})
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
def test_loaders_that_lightning_remakes_have_the_settings(package, make):
    # GIVEN a loader made as within `fit()`, and another one with settings
    data = importlib.import_module(f"{package}.trainer.connectors.data_connector")
    config = LoaderConfig(num_workers=2, prefetch_factor=4, batch_size=8)
    with data._replace_dunder_methods(DataLoader, "dataset"):
        own = make()
        before = {name: str(value) for name, value in vars(own).items()}
        loader = config.apply_to(own)
    # WHEN Lightning makes it once more, with a sampler of its own
    anew = data._update_dataloader(loader, SequentialSampler(FEW))
    # THEN that one has the settings, and the first one is as before
    assert type(anew) is type(own)
    assert LoaderConfig.from_loader(anew) == LoaderConfig.from_loader(loader)
    assert (anew.num_workers, anew.prefetch_factor, anew.persistent_workers) == (2, 4, False)
    assert type(anew.sampler) is SequentialSampler
    assert anew.batch_size == anew.batch_sampler.batch_size == 8
    assert {name: str(value) for name, value in vars(own).items()} == before


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
    utilities = importlib.import_module("lightning.pytorch.utilities")
    return utilities.CombinedLoader(loaders, "min_size")


@pytest.mark.parametrize(
    ("contain", "place"), [(dict, "['a']"), (as_list, "[0]"), (combined, "[0]")]
)
def test_several_tuned_loaders_stay_as_they_were(contain, place, monkeypatch):
    results, given, data = [], [], Several(contain)

    def tune(*args):
        given.append(args)
        best = LoaderConfig(num_workers=len(given))
        results.append(TuningResult(best=best, status="complete"))
        return results[-1]

    # GIVEN a container of two loaders, each of which gets other settings
    monkeypatch.setattr(autotune_loader, "tune", tune)
    tuned(data, torch.nn.Linear(4, 2))
    # WHEN it is asked for its loaders
    with pytest.warns(UserWarning, match="whose batches a step takes together") as told:
        made = data.train_dataloader()
    # THEN each is tuned alone, and their places are named
    assert f"train_dataloader(){place}" in [str(each.message).partition(" ")[0] for each in told]
    assert given == [(each,) for each in data.loaders.values()]
    wanted = dict(zip("ab", results, strict=True)) if contain is dict else results
    assert data.tuning_result == wanted
    # AND the container is of its kind, the second time without tuning
    for several in (made, data.train_dataloader()):
        assert type(several) is type(contain(data.loaders))
        inner = several.iterables if contain is combined else several
        loaders = inner if contain is as_list else [inner["a"], inner["b"]]
        assert [(each.num_workers, each.batch_size) for each in loaders] == [(1, 64), (2, 32)]
    assert [each.num_workers for each in data.loaders.values()] == [0, 0]


def test_several_loaders_are_trained_from_with_the_settings(fit, parts):
    model, several = parts.Module(), Several(dict).loaders
    model.training_step = lambda batch: sum(model.model(*each)["loss"] for each in batch.values())
    loader = fit(model, tuned(several, model, config=CONFIG)).train_dataloader
    assert [LoaderConfig.from_loader(each) for each in loader.values()] == [CONFIG, CONFIG]
