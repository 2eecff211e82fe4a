import pickle
from dataclasses import replace

import cloudpickle
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from report.example import synthetic_result

from autotune_loader.bursts.step import build_step
from autotune_loader.integrations import transformers as integration
from autotune_loader.integrations.accelerate import tune_before_prepare, tune_live
from autotune_loader.integrations.transformers import plain_loader, training_arguments, tune_trainer
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.values import LoaderConfig
from tests.integrations.job import (
    BATCH,
    EPOCHS,
    FEW,
    QUICK,
    Classifier,
    Waiting,
    assert_changed,
    collate,
)

transformers = pytest.importorskip("transformers")
GradientCheckpointingLayer = pytest.importorskip(
    "transformers.modeling_layers"
).GradientCheckpointingLayer

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]  # its import takes most of it on a busy machine


@pytest.fixture
def trainer_of(tmp_path):
    """Makes a Trainer with a collator, of a class and with arguments of one's own."""
    quiet = {
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
    }

    def make(dataset, kind=transformers.Trainer, *, model=None, size=32, epochs=2, **fields):
        fields |= {
            "per_device_train_batch_size": size,
            "num_train_epochs": epochs,
            "remove_unused_columns": False,
            **quiet,
        }
        arguments = transformers.TrainingArguments(str(tmp_path), **fields)
        return kind(model or Classifier(), arguments, train_dataset=dataset, data_collator=collate)

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
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=batches, num_workers=workers
        )
        return self.accelerator.prepare(loader)


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Net(transformers.PreTrainedModel):
    """Reads tokens, and notes how often its layer computes and what its embeddings were."""

    config_class, supports_gradient_checkpointing, main_input_name = (
        transformers.PretrainedConfig,
        True,
        "x",
    )

    def __init__(self, config):
        super().__init__(config)
        self.embeddings, self.layer, self.head = (
            torch.nn.Embedding(10, 8),
            Layer(),
            torch.nn.Linear(8, 2),
        )
        self.embedded = []
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def _init_weights(self, module):
        pass

    def forward(self, x, labels=None):
        embedded = self.embeddings(x)
        self.embedded.append(embedded.detach())
        logits = self.head(self.layer(embedded).mean(1))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


class Stepping(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Doubled(transformers.Trainer):
    """Its loss is twice the usual, and it logs that."""

    def compute_loss(self, model, inputs, *_, **__):
        self.log({"twice": 2.0})
        return 2 * super().compute_loss(model, inputs)


class Live(transformers.Trainer):
    def get_train_dataloader(self):
        return tune_live(super().get_train_dataloader())


def test_a_trainer_is_tuned_with_its_own_parts_and_then_trains_with_untouched_weights(trainer_of):
    trainer = trainer_of(FEW)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    result = tune_trainer(trainer, **QUICK)
    assert all(
        torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True)
    )
    assert trainer.args.dataloader_num_workers == result.best.num_workers
    assert trainer.get_train_dataloader().num_workers == result.best.num_workers
    assert (result.batch_size, trainer.train().global_step) == (32, 2 * 8)


def test_sampler_loss_and_precision_of_the_trainers_own_are_heeded(trainer_of, monkeypatch):
    samplers = [
        type(plain_loader(trainer_of(FEW, kind)).sampler).__name__
        for kind in (transformers.Trainer, Own)
    ]
    assert samplers == ["RandomSampler", "SequentialSampler"]
    was_on, result = [], synthetic_result()
    tuned = lambda *_, **__: was_on.append(torch.is_autocast_enabled("cpu")) or result  # noqa: E731
    monkeypatch.setattr(integration, "tune", tuned)
    trainer = trainer_of(FEW, Own, bf16=True)
    tune_trainer(trainer)  # warnings are errors here
    tune_trainer(trainer, train_step=0.01)
    trainer.args._n_gpu = 2
    with pytest.warns(UserWarning, match="splits each batch across 2 GPUs .* torchrun"):
        tune_trainer(trainer, train_step=0.01)
    assert was_on == [True] * 3


TOKENS = {"x": torch.arange(30).reshape(6, 5) % 10, "labels": torch.tensor([0, 1] * 3)}


@pytest.fixture
def trial_of(trainer_of, monkeypatch):
    """The step of a trial, in a process that has got only what `tune()` was given: its model, and the step itself."""
    given = []
    monkeypatch.setattr(
        integration,
        "tune",
        lambda *args, **options: given.append((args, options)) or synthetic_result(),
    )

    def trial_of(kind=transformers.Trainer, model=None, options=(), **fields):
        trainer = trainer_of(
            FEW, kind, model=model or Net(transformers.PretrainedConfig()), **fields
        )
        before = state_of(trainer)
        tune_trainer(trainer, **dict(options))
        assert state_of(trainer) == before
        (loader, own), tune_options = given[-1]
        side = pickle.loads(cloudpickle.dumps(make_workload(loader, own, **tune_options).training))
        torch.manual_seed(0)
        return side.model, build_step(side, TOKENS)

    return trial_of


def state_of(trainer):
    """What must not change: the modules' hooks and plain attributes, and what the Trainer holds."""
    modules = [
        {name: value for name, value in vars(each).items() if isinstance(value, (bool, int))}
        | {"hooks": len(each._forward_hooks)}
        for each in trainer.model.modules()
    ]
    return (
        modules,
        {name: id(value) for name, value in vars(trainer).items()},
        len(trainer.state.log_history),
    )


def run(step, times=2):
    for _ in range(times):
        step.run(dict(TOKENS))


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, 1),
        (
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
            },
            2,
        ),
        ({"gradient_checkpointing": True, "label_smoothing_factor": 0.1}, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_layers_are_computed_in_trials_as_often_as_in_training(trial_of, fields, calls):
    model, step = trial_of(**fields)
    run(step)
    assert model.layer.calls == 2 * calls


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optim": "adafactor"}, "Adafactor"),
        ({"optim": "sgd"}, "SGD"),
        ({}, "AdamW"),
    ],
)
def test_the_optimizer_of_the_arguments_is_stepped_with_clipped_gradients(trial_of, fields, says):
    model, step = trial_of(max_grad_norm=1e-3, **fields)
    run(step)
    gradients = torch.cat(
        [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    )
    assert (step.description, round(gradients.norm().item(), 5)) == (
        f"model(**batch).loss, then backward and {says}.step()",
        1e-3,
    )


def test_noise_and_compilation_are_on_in_trials(trial_of):
    model, step = trial_of(neftune_noise_alpha=5.0)
    plain, most = model.embeddings.weight.detach().clone()[TOKENS["x"]], 5.0 / (5 * 8) ** 0.5
    run(step)
    noise = (model.embedded[0] - plain).abs()
    assert (0.9 * most < noise.max() <= most * 1.001, noise.mean() > 0.4 * most) == (True, True)
    model, _ = trial_of(torch_compile=True, torch_compile_backend="eager")
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("kind", "fields", "loss"),
    [
        (
            transformers.Trainer,
            {},
            lambda logits: torch.nn.functional.cross_entropy(logits, TOKENS["labels"]),
        ),
        (
            transformers.Trainer,
            {"label_smoothing_factor": 0.2},
            lambda logits: torch.nn.functional.cross_entropy(
                logits, TOKENS["labels"], label_smoothing=0.2
            ),
        ),
        (
            Doubled,
            {},
            lambda logits: 2 * torch.nn.functional.cross_entropy(logits, TOKENS["labels"]),
        ),
    ],
)
def test_the_loss_of_trials_is_the_trainers(trainer_of, trial_of, kind, fields, loss):
    trainer_of(FEW).train()  # of which Accelerate still knows
    model, step = trial_of(kind, **fields)
    losses = []
    inner = step.forward
    step.forward = lambda batch: losses.append(inner(batch)) or losses[-1]
    with torch.no_grad():
        expected = loss(model(TOKENS["x"]).logits)
    run(step, 1)
    assert torch.allclose(losses[0], expected)
    assert step.description.endswith(", then backward and AdamW.step()")


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        (
            {"gradient_accumulation_steps": 4},
            transformers.Trainer,
            r"args\.gradient_accumulation_steps=4",
        ),
        (
            {"use_liger_kernel": True, "gradient_accumulation_steps": 2},
            transformers.Trainer,
            "liger_kernel=True, .*=2",
        ),
        ({}, Stepping, "own training_step; a train_step= that does it would work"),
    ],
)
def test_what_trials_leave_out_is_said_once(trial_of, fields, kind, says):
    with pytest.warns(UserWarning, match=f"trials train without .*{says}") as told:
        trial_of(kind, **fields)
    assert len(told) == 1
    trial_of(kind, **fields, options={"train_step": 0.01})  # warnings are errors here


def test_a_loader_of_the_trainers_own_is_measured_and_what_it_does_not_heed_is_said(
    trainer_of, monkeypatch
):
    tuned, result = (
        [],
        replace(synthetic_result(), best=LoaderConfig(num_workers=2, prefetch_factor=4)),
    )
    monkeypatch.setattr(
        integration, "tune", lambda loader, *_, **__: tuned.append(loader) or result
    )
    with pytest.warns(
        UserWarning, match="ignores args for prefetch_factor=4; return result.apply_to"
    ):
        tune_trainer(trainer_of(FEW, Bucketed))
    assert tuned[0].batch_sampler == [[0, 1, 2], [3]]


def test_the_fields_of_a_file_make_training_arguments(trainer_of):
    config = LoaderConfig(num_workers=2, prefetch_factor=4, persistent_workers=True)
    loader = trainer_of(FEW, **training_arguments(config)).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)
    assert training_arguments(LoaderConfig()) == {
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }


def test_what_accelerate_has_prepared_changes_in_the_midst_of_training(trainer_of):
    trainer = trainer_of(Waiting(), Live, size=BATCH, epochs=EPOCHS)
    trainer.train()
    assert_changed(trainer.callback_handler.train_dataloader.base_dataloader, trainer.model.seen)


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # of torchdata
def test_a_prepared_loader_that_keeps_a_state_is_refused_and_stays_what_it_is():
    pytest.importorskip("torchdata")
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    prepared = accelerator.prepare(
        torch.utils.data.DataLoader(FEW, batch_size=BATCH, collate_fn=collate)
    )
    with pytest.raises(
        TypeError,
        match=r"StatefulDataLoader, .* tune_before_prepare\(accelerator, loader\) would work",
    ):
        tune_live(prepared)
    next(iter(prepared))
    assert (type(prepared.base_dataloader).__name__, bool(prepared.state_dict())) == (
        "StatefulDataLoader",
        True,
    )


def test_the_bursts_train_in_the_precision_of_the_accelerator():
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    loader = torch.utils.data.DataLoader(FEW, batch_size=BATCH, collate_fn=collate)
    _, result = tune_before_prepare(accelerator, loader, Classifier(), **QUICK)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "autocast.cpu=torch.bfloat16" in str(result.warnings)
