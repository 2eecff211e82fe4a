"""Hugging Face's Trainer, and Accelerate, in this process."""

import contextlib
import functools
import importlib
import pickle

import cloudpickle
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import autotune_loader
from autotune_loader import TuningResult, enable
from autotune_loader.bursts.step import build_step
from autotune_loader.integrations import accelerate as accelerates
from autotune_loader.integrations.transformers import (
    log_metrics,
    plain_loader,
    training_arguments,
    tune_trainer,
)
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.values import LoaderConfig
from tests.integrations.job import BATCH, EPOCHS, FEW, Waiting, assert_changed, collate

pytestmark = [
    pytest.mark.system,
    pytest.mark.xdist_group("frameworks"),
    pytest.mark.timeout(300),  # its import takes most of it on a busy machine
]
TOKENS = {"x": torch.arange(30).reshape(6, 5) % 10, "labels": torch.tensor([0, 1] * 3)}
FOUND = TuningResult(best=LoaderConfig(num_workers=2, prefetch_factor=4), status="complete")


@pytest.fixture
def parts():
    return pytest.importorskip("tests.integrations.transformers_parts")


@pytest.fixture
def trainer_of(parts, tmp_path):
    return functools.partial(parts.trainer_in, tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """What `tune()` is asked for, and whether in bfloat16; it finds `FOUND`."""
    asked = []

    def tune(*given, **options):
        asked.append((given, options, torch.is_autocast_enabled("cpu")))
        return FOUND

    monkeypatch.setattr(autotune_loader, "tune", tune)
    return asked


@pytest.mark.smoke
@pytest.mark.usefixtures("simulated_bursts")
def test_a_trainer_trains_with_the_tuned_settings(trainer_of):
    trainer = trainer_of(FEW)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    result = tune_trainer(trainer, progress=False)
    # THEN its weights are untouched
    assert all(map(torch.equal, before, trainer.model.parameters()))
    # AND its arguments and its loader have the settings
    assert result.batch_size == 32
    assert result.best.num_workers > 0
    assert trainer.args.dataloader_num_workers == result.best.num_workers
    assert trainer.get_train_dataloader().num_workers == result.best.num_workers
    trainer.args.dataloader_num_workers, trainer.args.dataloader_prefetch_factor = 0, None
    trainer.args.dataloader_persistent_workers = False
    assert trainer.train().global_step == 2 * 8


@pytest.mark.parametrize(
    ("kind", "sampler"), [("Trainer", "RandomSampler"), ("Own", "SequentialSampler")]
)
def test_the_sampler_of_the_trainer_is_measured(kind, sampler, trainer_of):
    trainer = trainer_of(FEW, kind, dataloader_drop_last=True)
    before = {**vars(trainer)}, {**vars(trainer.accelerator)}
    loader = plain_loader(trainer)
    assert type(loader) is DataLoader
    assert type(loader.sampler).__name__ == sampler
    assert (loader.dataset, loader.batch_size, loader.drop_last) == (FEW, 32, True)
    # THEN nothing of the trainer has changed
    assert (vars(trainer), vars(trainer.accelerator)) == before
    assert trainer.accelerator._dataloaders == []


@pytest.mark.parametrize("kind", ["Trainer", "Live"])
def test_a_trainers_logs_have_the_loaders_metrics(kind, trainer_of):
    """A watched loader's, or an AutoLoader's."""
    trainer = trainer_of(FEW, kind, logging_strategy="steps", logging_steps=4)
    reported = []
    trainer.callback_handler.callbacks[-1].on_log = lambda *_, logs, **__: reported.append({**logs})
    log_metrics(trainer)
    with enable("watch") if kind == "Trainer" else contextlib.nullcontext():
        trainer.train()
    names = {f"loader/{name}" for name in ("wait_s", "wait_share", "samples_per_s", "num_workers")}
    for logs in (reported, trainer.state.log_history):
        told = [each.keys() >= names for each in logs]
        assert told == [True] * 4 + [False]  # the last one sums up


def test_trials_train_in_the_precision_of_the_trainer(trainer_of, asked):
    trainer = trainer_of(FEW, "Own", bf16=True)
    tune_trainer(trainer)  # warnings are errors here
    trainer.args._n_gpu = 2
    with pytest.warns(UserWarning, match="splits each batch across 2 GPUs .* torchrun"):
        tune_trainer(trainer, train_step=0.01)
    assert [is_on for *_, is_on in asked] == [True, True]


def test_trials_train_in_the_precision_of_the_accelerator(asked):
    accelerate = pytest.importorskip("accelerate")
    state = importlib.import_module("accelerate.state").AcceleratorState
    state._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    loader, _ = accelerates.tune_before_prepare(accelerator, DataLoader(FEW))
    state._reset_state(reset_partial_state=True)
    assert asked[0][2]
    assert LoaderConfig.from_loader(loader) == FOUND.best


@pytest.fixture
def trial_of(trainer_of, parts, asked):
    """The model and the step of a trial, in a process that has only what `tune()` was given."""

    def trial_of(kind="Trainer", options=(), **fields):
        trainer = trainer_of(FEW, kind, model=parts.Net(), **fields)
        before = state_of(trainer)
        tune_trainer(trainer, **dict(options))
        assert state_of(trainer) == before
        (loader, model), tune_options, _ = asked[-1]
        training = make_workload(loader, model, **tune_options).training
        side = pickle.loads(cloudpickle.dumps(training))
        torch.manual_seed(0)
        return side.model, build_step(side, TOKENS)

    return trial_of


def state_of(trainer):
    """What must not change: hooks and plain attributes of modules, and what the Trainer holds."""
    of_modules = []
    for each in trainer.model.modules():
        plain = {key: value for key, value in vars(each).items() if isinstance(value, bool | int)}
        of_modules.append((plain, len(each._forward_hooks)))
    held = {key: id(value) for key, value in vars(trainer).items()}
    return of_modules, held, len(trainer.state.log_history)


def run(step, times=2):
    for _ in range(times):
        step.run(dict(TOKENS))


ANEW = {"gradient_checkpointing": True}
PLAINLY = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("fields", "calls"),
    [({}, 1), ({**ANEW, **PLAINLY}, 2), ({**ANEW, "label_smoothing_factor": 0.1}, 2)],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_trials_compute_layers_as_often_as_training(trial_of, fields, calls):
    model, step = trial_of(**fields)
    run(step)
    assert model.layer.calls == 2 * calls


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"optim": "adafactor"}, "Adafactor"), ({"optim": "sgd"}, "SGD"), ({}, "AdamW")],
)
def test_the_trainers_optimizer_steps_with_clipped_gradients(trial_of, fields, says):
    model, step = trial_of(max_grad_norm=1e-3, **fields)
    run(step)
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    assert torch.cat(gradients).norm().item() == pytest.approx(1e-3, rel=0.01)
    assert step.description == f"model(**batch).loss, then backward and {says}.step()"


def test_noise_of_embeddings_is_on_in_trials(trial_of):
    model, step = trial_of(neftune_noise_alpha=5.0)
    plain = model.embeddings.weight.detach().clone()[TOKENS["x"]]
    run(step)
    noise, most = (model.embedded[0] - plain).abs(), 5.0 / (5 * 8) ** 0.5
    assert 0.9 * most < noise.max() <= most * 1.001
    assert noise.mean() > 0.4 * most


def test_compilation_is_on_in_trials(trial_of):
    model, _ = trial_of(torch_compile=True, torch_compile_backend="eager")
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("kind", "smoothing", "times"), [("Trainer", 0.0, 1), ("Trainer", 0.2, 1), ("Doubled", 0.0, 2)]
)
def test_the_loss_of_trials_is_the_trainers(trainer_of, trial_of, kind, smoothing, times):
    trainer_of(FEW).train()  # of which Accelerate still knows
    model, step = trial_of(kind, label_smoothing_factor=smoothing)
    losses, inner = [], step.forward
    step.forward = lambda batch: losses.append(inner(batch)) or losses[-1]
    with torch.no_grad():
        logits = model(TOKENS["x"]).logits
    run(step, 1)
    expected = times * cross_entropy(logits, TOKENS["labels"], label_smoothing=smoothing)
    assert torch.allclose(losses[0], expected)
    assert step.description.endswith(", then backward and AdamW.step()")


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"gradient_accumulation_steps": 4}, "Trainer", r"args\.gradient_accumulation_steps=4"),
        (
            {"use_liger_kernel": True, "gradient_accumulation_steps": 2},
            "Trainer",
            "liger_kernel=True, .*=2",
        ),
        ({}, "Stepping", "own training_step. Try a train_step= that does it."),
    ],
)
def test_what_trials_leave_out_is_said_once(trial_of, fields, kind, says):
    with pytest.warns(UserWarning, match=f"trials train without .*{says}") as told:
        trial_of(kind, **fields)
    assert len(told) == 1
    trial_of(kind, **fields, options={"train_step": 0.01})  # warnings are errors here


def test_a_trainers_own_loader_is_measured(trainer_of, asked):
    """What it does not heed is said."""
    says = r"ignores args for prefetch_factor=4\. Return result.apply_to"
    with pytest.warns(UserWarning, match=says):
        tune_trainer(trainer_of(FEW, "Bucketed"))
    ((loader, _), *_) = asked[0]
    assert loader.batch_sampler == [[0, 1, 2], [3]]


def test_the_fields_of_a_file_make_training_arguments(trainer_of):
    config = LoaderConfig(num_workers=2, prefetch_factor=4, persistent_workers=True)
    loader = trainer_of(FEW, **training_arguments(config)).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)
    none = {"dataloader_num_workers": 0, "dataloader_pin_memory": False}
    assert training_arguments(LoaderConfig()) == none


def test_what_accelerate_has_prepared_changes_while_training(trainer_of):
    trainer = trainer_of(Waiting(), "Live", size=BATCH, num_train_epochs=EPOCHS)
    trainer.train()
    assert_changed(trainer.callback_handler.train_dataloader.base_dataloader, trainer.model.seen)


def test_a_trainer_without_workers_prefetches_nothing(trainer_of, monkeypatch):
    none = TuningResult(best=LoaderConfig(), status="complete")
    monkeypatch.setattr(autotune_loader, "tune", lambda *_, **__: none)
    workers = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4}
    trainer = trainer_of(FEW, dataloader_persistent_workers=True, **workers)
    tune_trainer(trainer)
    assert trainer.args.dataloader_prefetch_factor is None
    assert trainer.get_train_dataloader().num_workers == 0


def test_neither_trainer_nor_prepared_loader_is_refused(parts):
    with pytest.raises(TypeError, match=r"trainer=int .* Try tune\(loader, model\)"):
        tune_trainer(42)
    with pytest.raises(TypeError, match=r"prepared=DataLoader .*\(loader\) returns with"):
        accelerates.tune_live(DataLoader(FEW))


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # of torchdata
def test_a_prepared_loader_with_a_state_is_refused():
    pytest.importorskip("torchdata")
    accelerate = pytest.importorskip("accelerate")
    how = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=how)
    prepared = accelerator.prepare(DataLoader(FEW, batch_size=BATCH, collate_fn=collate))
    says = r"StatefulDataLoader, .* Try tune_before_prepare\(accelerator, loader\)"
    with pytest.raises(TypeError, match=says):
        accelerates.tune_live(prepared)
    # THEN it stays what it is
    next(iter(prepared))
    assert type(prepared.base_dataloader).__name__ == "StatefulDataLoader"
    assert prepared.state_dict()
