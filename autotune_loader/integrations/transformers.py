"""Hugging Face Trainer: `TrainingArguments` from `loader.json`, and tuning from a `Trainer`.

args = TrainingArguments("out", **training_arguments(load_config()))       # tuned before
tune_trainer(trainer, budget="60s"); trainer.train()                       # tuned now
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from autotune_loader.diagnosis import Caution
from autotune_loader.integrations import require
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.tune import tune
from autotune_loader.values.config import LoaderConfig


def training_arguments(config: LoaderConfig) -> dict[str, Any]:
    """The fields of `TrainingArguments` that a configuration decides: `TrainingArguments("out", **fields)`.

    A Trainer makes its own copies to the device, so `device_prefetch` has no field; call `config.apply()` for threads.
    """
    return {f"dataloader_{name}": value for name, value in config.to_kwargs().items()}


def tune_trainer(trainer: Any, **options: Any) -> TuningResult:
    """Tune with the Trainer's own model, dataset, collator and batch size, and set its arguments as tuned.

    Every rank must call it. The bursts step AdamW over `model(**batch).loss`; a Trainer with a `compute_loss` of its own
    passes `train_step`.

    Args:
        trainer: a `transformers.Trainer`; its model and dataset are left as they are.
        **options: of `tune()`.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    require("transformers", feature="Tuning from a Trainer", extra="transformers")
    import torch

    if not hasattr(trainer, "get_train_dataloader"):
        raise TypeError(
            f"trainer={type(trainer).__name__} is not a transformers.Trainer; tune(dataset, model) would work"
        )
    args = trainer.args
    optimizer = functools.partial(torch.optim.AdamW, lr=args.learning_rate)
    options = {"optimizer": optimizer, "device": str(args.device), **options}
    with trainer.accelerator.autocast():  # bf16 and fp16 of the arguments
        result = tune(plain_loader(trainer), trainer.model, **options)
    own = [name for name in ("compute_loss", "training_step") if is_overridden(trainer, name)]
    if own and options.get("train_step") is None:
        text = f"the bursts trained model(**batch).loss without the Trainer's own {' and '.join(own)}; pass train_step="
        note = Caution.NOTE(text=text)
        result = replace(result, warnings=(*result.warnings, note))
    for name, value in training_arguments(result.best).items():
        setattr(args, name, value)
    if result.best.num_workers == 0:
        args.dataloader_prefetch_factor, args.dataloader_persistent_workers = None, False
    return result


def is_overridden(trainer: Any, name: str) -> bool:
    """Whether a Trainer has a method of its own in place of transformers'."""
    return not getattr(type(trainer), name).__module__.startswith("transformers.")


def plain_loader(trainer: Any) -> Any:
    """The Trainer's training loader before Accelerate wraps it: same dataset and collator, without unused columns."""
    from torch.utils.data import IterableDataset

    from autotune_loader.pipeline.build import build_loader

    args = trainer.args
    own = trainer.get_train_dataloader()
    sampler = getattr(getattr(own, "batch_sampler", None), "sampler", None)
    is_random = "RandomSampler" in type(sampler).__name__ or isinstance(own.dataset, IterableDataset)
    shuffle = None if isinstance(own.dataset, IterableDataset) else True
    workers = args.dataloader_num_workers
    return build_loader(
        own.dataset,
        batch_size=args.train_batch_size,
        **({"shuffle": shuffle} if is_random or sampler is None else {"sampler": sampler}),
        collate_fn=own.collate_fn,
        drop_last=args.dataloader_drop_last,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
    )
