from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from report.example import synthetic_result

from autotune_loader.integrations import transformers as integration
from autotune_loader.integrations.accelerate import tune_before_prepare, tune_live
from autotune_loader.integrations.transformers import plain_loader, training_arguments, tune_trainer
from autotune_loader.values import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, FEW, QUICK, Classifier, Waiting, assert_changed, collate

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # its import takes most of it on a busy machine


@pytest.fixture
def trainer_of(tmp_path):
    """Makes a Trainer with a collator, of a class and with arguments of one's own."""
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}

    def make(dataset, kind=transformers.Trainer, *, size=32, epochs=2, **fields):
        fields |= {
            "per_device_train_batch_size": size,
            "num_train_epochs": epochs,
            "remove_unused_columns": False,
            **quiet,
        }
        arguments = transformers.TrainingArguments(str(tmp_path), **fields)
        return kind(Classifier(), arguments, train_dataset=dataset, data_collator=collate)

    return make


class Own(transformers.Trainer):
    """Has a loss of its own, and its own order, as one that groups by length."""

    def compute_loss(self, model, inputs, **_):
        return model(**inputs)["loss"] * 2

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Bucketed(transformers.Trainer):
    """Makes its own batches, and heeds one argument."""

    def get_train_dataloader(self):
        batches, workers = [[0, 1, 2], [3]], self.args.dataloader_num_workers
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, num_workers=workers)
        return self.accelerator.prepare(loader)


class Live(transformers.Trainer):
    def get_train_dataloader(self):
        return tune_live(super().get_train_dataloader())


def test_a_trainer_is_tuned_with_its_own_parts_and_then_trains_with_untouched_weights(trainer_of):
    trainer = trainer_of(FEW)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    result = tune_trainer(trainer, **QUICK)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.args.dataloader_num_workers == result.best.num_workers
    assert trainer.get_train_dataloader().num_workers == result.best.num_workers
    assert (result.batch_size, trainer.train().global_step) == (32, 2 * 8)


def test_sampler_loss_and_precision_of_the_trainers_own_are_heeded(trainer_of, monkeypatch):
    samplers = [type(plain_loader(trainer_of(FEW, kind)).sampler).__name__ for kind in (transformers.Trainer, Own)]
    assert samplers == ["RandomSampler", "SequentialSampler"]
    was_on, result = [], synthetic_result()
    tuned = lambda *_, **__: was_on.append(torch.is_autocast_enabled("cpu")) or result  # noqa: E731
    monkeypatch.setattr(integration, "tune", tuned)
    trainer = trainer_of(FEW, Own, bf16=True)
    with pytest.warns(UserWarning, match="own compute_loss; pass train_step="):
        tune_trainer(trainer)
    tune_trainer(trainer, train_step=0.01)  # warnings are errors here
    trainer.args._n_gpu = 2
    with pytest.warns(UserWarning, match="splits each batch across 2 GPUs .* torchrun"):
        tune_trainer(trainer, train_step=0.01)
    assert was_on == [True] * 3


def test_a_loader_of_the_trainers_own_is_measured_and_what_it_does_not_heed_is_said(trainer_of, monkeypatch):
    tuned, result = [], replace(synthetic_result(), best=LoaderConfig(num_workers=2, prefetch_factor=4))
    monkeypatch.setattr(integration, "tune", lambda loader, *_, **__: tuned.append(loader) or result)
    with pytest.warns(UserWarning, match="ignores args for prefetch_factor=4; return result.apply_to"):
        tune_trainer(trainer_of(FEW, Bucketed))
    assert tuned[0].batch_sampler == [[0, 1, 2], [3]]


def test_the_fields_of_a_file_make_training_arguments(trainer_of):
    config = LoaderConfig(num_workers=2, prefetch_factor=4, persistent_workers=True)
    loader = trainer_of(FEW, **training_arguments(config)).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)
    assert training_arguments(LoaderConfig()) == {"dataloader_num_workers": 0, "dataloader_pin_memory": False}


def test_what_accelerate_has_prepared_changes_in_the_midst_of_training(trainer_of):
    trainer = trainer_of(Waiting(), Live, size=BATCH, epochs=EPOCHS)
    trainer.train()
    assert_changed(trainer.callback_handler.train_dataloader.base_dataloader, trainer.model.seen)


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # of torchdata
def test_a_prepared_loader_that_keeps_a_state_is_refused_and_stays_what_it_is():
    pytest.importorskip("torchdata")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    prepared = accelerator.prepare(torch.utils.data.DataLoader(FEW, batch_size=BATCH, collate_fn=collate))
    with pytest.raises(
        TypeError, match=r"StatefulDataLoader, .* tune_before_prepare\(accelerator, loader\) would work"
    ):
        tune_live(prepared)
    next(iter(prepared))
    assert (type(prepared.base_dataloader).__name__, bool(prepared.state_dict())) == ("StatefulDataLoader", True)


def test_the_bursts_train_in_the_precision_of_the_accelerator():
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    loader = torch.utils.data.DataLoader(FEW, batch_size=BATCH, collate_fn=collate)
    _, result = tune_before_prepare(accelerator, loader, Classifier(), **QUICK)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "autocast.cpu=torch.bfloat16" in str(result.warnings)
