"""Hugging Face Trainer: `TrainingArguments` from `loader.json`, or tuning from a `Trainer`.

args = TrainingArguments("out", **training_arguments(load_config()))       # tuned before
tune_trainer(trainer, budget="60s"); trainer.train()                       # tuned now
log_metrics(trainer)                                                       # how long it waits for data
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import warnings
from dataclasses import dataclass
from typing import Any

import autotune_loader
from autotune_loader import LoaderConfig, TuningResult
from autotune_loader.integrations import metrics_of, require

LEFT_OUT = ("use_liger_kernel", "deepspeed", "fsdp")
"""Arguments that make a step another one, and need the Trainer's own process."""
OF_LAYERS = ("every_n_layers", "offload")
"""Among the options of checkpointing, those of the model; the others are torch's."""
OF_DATA = {
    *("train_dataset", "eval_dataset", "data_collator", "train_dataloader", "eval_dataloader"),
    *("optimizer", "lr_scheduler", "gather_function"),
}
"""Attributes of a Trainer and of its callbacks that a loss does not need."""


def training_arguments(config: LoaderConfig) -> dict[str, Any]:
    """The fields of `TrainingArguments` that a configuration decides: `TrainingArguments("out", **fields)`."""
    return {f"dataloader_{name}": value for name, value in config.to_kwargs().items()}


def tune_trainer(trainer: Any, **options: Any) -> TuningResult:
    """Tune with the Trainer's own model, dataset, collator and batch size, and set its arguments as tuned.

    Every rank must call it. Trials train with what `train()` switches on: checkpointing of activations, torch.compile, noise
    of embeddings, clipping of gradients, the kind of optimizer, and the Trainer's loss. What they leave out is said.

    Args:
        trainer: a `transformers.Trainer`; its model and dataset are left as they are.
        **options: of `tune()`.

    Raises:
        MissingExtraError: transformers is not installed.
        TypeError: it is no Trainer.
    """
    require("transformers", "Tuning from a Trainer")
    if not hasattr(trainer, "get_train_dataloader"):
        raise TypeError(f"trainer={type(trainer).__name__} is not a transformers.Trainer. Try tune(loader, model).")
    args = trainer.args
    options = {"device": str(args.device), **options}
    left_out = _left_out(trainer) if options.get("train_step") is None else []
    if options.get("optimizer") is None:
        options["optimizer"] = _optimizer_of(trainer)
    options["optimizer"] = _Begin(trainer.model, args, trainer.neftune_noise_alpha, options["optimizer"])
    losses = (trainer.label_smoother, getattr(trainer, "compute_loss_func", None))
    if _is_overridden(trainer, "compute_loss") or any(each is not None for each in losses):
        options.setdefault("train_step", functools.partial(_loss, _without_data(trainer)))
    if left_out:
        warnings.warn(f"trials train without {', '.join(left_out)}. Try a train_step= that does it.", stacklevel=2)
    if args.n_gpu > 1:
        warnings.warn(
            f"the Trainer splits each batch across {args.n_gpu} GPUs (DataParallel), but trials use one GPU, which takes "
            "longer. Try torchrun, with one process per GPU.",
            stacklevel=2,
        )
    with trainer.accelerator.autocast():  # bf16 and fp16 of the arguments
        result = autotune_loader.tune(plain_loader(trainer), trainer.model, **options)
    if result.best.num_workers == 0:
        args.dataloader_prefetch_factor, args.dataloader_persistent_workers = None, False
    for name, value in training_arguments(result.best).items():
        setattr(args, name, value)
    if _is_overridden(trainer, "get_train_dataloader"):
        made, best = LoaderConfig.from_loader(plain_loader(trainer)).to_kwargs(), result.best.to_kwargs()
        if unheeded := ", ".join(f"{name}={value!r}" for name, value in best.items() if made.get(name) != value):
            warnings.warn(
                f"the Trainer's own get_train_dataloader ignores args for {unheeded}. "
                "Return result.apply_to(loader) in it.",
                stacklevel=2,
            )
    return result


def log_metrics(trainer: Any, prefix: str = "loader/") -> None:
    """Add `AutoLoader.metrics()` of the training loader to the Trainer's logs, for all that `report_to` names.

    The loader is one of `tune_live()`, or any loader under `watch`, `run` or `enable()`.

    Args:
        trainer: A `transformers.Trainer`, which gets a callback ahead of its others.
        prefix: Put before each name.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    require("transformers", "log_metrics()")
    from transformers import TrainerCallback

    class MetricsCallback(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **of_event: Any) -> None:  # noqa: ARG002 - as it is called
            logs, loader = of_event["logs"], of_event["train_dataloader"]
            if "loss" in logs:  # a log of training
                figures = metrics_of([getattr(loader, "base_dataloader", loader)], prefix)
                logs.update(figures)
                state.log_history[-1].update(figures)

    trainer.callback_handler.callbacks.insert(0, MetricsCallback())


@dataclass
class _Begin:
    """Makes the optimizer; before that, what `Trainer.train()` switches on in the model is on: where trials run, only there."""

    model: Any
    args: Any
    noise: float | None
    optimizer: Any
    """An optimizer, or what makes one."""

    def __call__(self, parameters: list[Any]) -> Any:
        args, model = self.args, self.model
        # The first since transformers 5, the second before.
        checkpointing = ("activation_checkpointing", "gradient_checkpointing")
        if any(getattr(args, name, False) for name in checkpointing):
            name = next(name for name in checkpointing if hasattr(model, f"{name}_enable"))
            options = dict(getattr(args, f"{name}_kwargs", None) or {})
            of_layers = {key: options.pop(key) for key in OF_LAYERS if key in options}
            getattr(model, f"{name}_enable")(options or None, **of_layers)
        if self.noise is not None:
            model.get_input_embeddings().register_forward_hook(functools.partial(_noisy, self.noise))
        if args.torch_compile:
            model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        optimizer = self.optimizer
        if isinstance(optimizer, type) or not hasattr(optimizer, "step"):
            optimizer = optimizer(parameters)
        if args.max_grad_norm and hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(functools.partial(_clip, parameters, args.max_grad_norm))
        return optimizer


def _clip(parameters: list[Any], max_norm: float, *_of_hook: Any) -> None:
    importlib.import_module("torch.nn.utils").clip_grad_norm_(parameters, max_norm)


def _noisy(alpha: float, _module: Any, _inputs: Any, output: Any) -> Any:
    """Embeddings with NEFTune's noise."""
    bound = alpha / math.sqrt(output.size(1) * output.size(2))
    return output + output.new_empty(output.shape).uniform_(-bound, bound)


def _left_out(trainer: Any) -> list[str]:
    """What training does and trials do not."""
    args, optim = trainer.args, getattr(trainer.args.optim, "value", trainer.args.optim)
    names = [f"args.{name}={value}" for name in LEFT_OUT if (value := getattr(args, name, None))]
    if args.gradient_accumulation_steps > 1:
        names.append(f"args.gradient_accumulation_steps={args.gradient_accumulation_steps}")
    if _steps_in_backward(optim):
        names.append(f"args.optim={optim}")
    return names + (["the Trainer's own training_step"] if _is_overridden(trainer, "training_step") else [])


def _steps_in_backward(optim: str) -> bool:
    return "layerwise" in optim or "lomo" in optim


def _optimizer_of(trainer: Any) -> Any:
    """The Trainer's optimizer, or one as it would make, which it does not keep."""
    if _steps_in_backward(getattr(trainer.args.optim, "value", trainer.args.optim)):  # making it changes the model
        return functools.partial(importlib.import_module("torch.optim").AdamW, lr=trainer.args.learning_rate)
    alone = copy.copy(trainer)
    alone.create_optimizer()
    return getattr(alone.optimizer, "optimizer", alone.optimizer)  # without Accelerate's wrapper


def _loss(trainer: Any, model: Any, batch: Any) -> Any:
    return trainer.compute_loss(model, trainer._prepare_inputs(batch))


def _without_data(trainer: Any) -> Any:
    """A copy that computes losses in trials: it has no data, calls nobody back, and the model is given to it."""
    alone = copy.copy(trainer)
    alone.callback_handler = copy.copy(trainer.callback_handler)
    alone.callback_handler.callbacks = []
    for owner in (alone, alone.callback_handler):
        vars(owner).update(dict.fromkeys(OF_DATA & vars(owner).keys()))
    alone.accelerator = copy.copy(trainer.accelerator)
    of_training = [name for name, value in vars(alone.accelerator).items() if isinstance(value, list)]
    vars(alone.accelerator).update({name: [] for name in of_training}, gradient_state=None)  # loaders, trackers
    return alone


def plain_loader(trainer: Any) -> Any:
    """The Trainer's training loader as it is before `accelerator.prepare`, by a copy of the Trainer that prepares nothing."""
    alone = copy.copy(trainer)
    alone.accelerator = copy.copy(trainer.accelerator)
    alone.accelerator.prepare = lambda *given, **_: given if given[1:] else given[0]
    made = alone.get_train_dataloader()
    return getattr(made, "base_dataloader", made)


def _is_overridden(trainer: Any, name: str) -> bool:
    """Whether a Trainer has a method of its own in place of transformers'."""
    return not getattr(type(trainer), name).__module__.startswith("transformers.")
