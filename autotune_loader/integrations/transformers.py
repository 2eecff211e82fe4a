"""Hugging Face Trainer: `TrainingArguments` from `loader.json`, or tuning from a `Trainer`.

args = TrainingArguments("out", **training_arguments(load_config()))       # tuned before
tune_trainer(trainer, budget="60s"); trainer.train()                       # tuned now
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from autotune_loader import LoaderConfig, TuningResult, tune
from autotune_loader.integrations import require


def training_arguments(config: LoaderConfig) -> dict[str, Any]:
    """The fields of `TrainingArguments` that a configuration decides: `TrainingArguments("out", **fields)`."""
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
        TypeError: it is no Trainer.
    """
    require("transformers", "Tuning from a Trainer")
    import torch

    if not hasattr(trainer, "get_train_dataloader"):
        raise TypeError(
            f"trainer={type(trainer).__name__} is not a transformers.Trainer; tune(loader, model) would work"
        )
    args = trainer.args
    own = " and ".join(name for name in ("compute_loss", "training_step") if _is_overridden(trainer, name))
    if own and options.get("train_step") is None:
        warnings.warn(
            f"trials train model(**batch).loss without the Trainer's own {own}; pass train_step=", stacklevel=2
        )
    if args.n_gpu > 1:
        warnings.warn(
            f"the Trainer splits each batch across {args.n_gpu} GPUs (DataParallel), but trials use one GPU, which takes "
            "longer; torchrun, with one process per GPU, would work",
            stacklevel=2,
        )
    optimizer = functools.partial(torch.optim.AdamW, lr=args.learning_rate)
    options = {"optimizer": optimizer, "device": str(args.device), **options}
    with trainer.accelerator.autocast():  # bf16 and fp16 of the arguments
        result = tune(plain_loader(trainer), trainer.model, **options)
    if result.best.num_workers == 0:
        args.dataloader_prefetch_factor, args.dataloader_persistent_workers = None, False
    for name, value in training_arguments(result.best).items():
        setattr(args, name, value)
    if _is_overridden(trainer, "get_train_dataloader"):
        made, best = LoaderConfig.from_loader(plain_loader(trainer)).arguments(), result.best.arguments()
        if unheeded := ", ".join(f"{name}={value!r}" for name, value in best.items() if made.get(name) != value):
            warnings.warn(
                f"the Trainer's own get_train_dataloader ignores args for {unheeded}; "
                "return result.apply_to(loader) in it would work",
                stacklevel=2,
            )
    return result


def plain_loader(trainer: Any) -> Any:
    """The Trainer's training loader before Accelerate wraps it: same dataset, order and collator, without unused columns.

    One that is the Trainer's own, or has batches of its own, is that which Accelerate has wrapped.
    """
    from torch.utils.data import DataLoader, IterableDataset

    args, own = trainer.args, trainer.get_train_dataloader()
    batches = getattr(own, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of several ranks
    if _is_overridden(trainer, "get_train_dataloader") or type(batches).__name__ not in ("BatchSampler", "NoneType"):
        return getattr(own, "base_dataloader", own)
    sampler = getattr(batches, "sampler", None)
    order: dict[str, Any] = {"sampler": sampler}
    if isinstance(own.dataset, IterableDataset):
        order = {}
    elif sampler is None or "RandomSampler" in type(sampler).__name__:  # Accelerate's is seeded for all ranks
        order = {"shuffle": True}
    of_workers = {}
    if args.dataloader_num_workers:
        of_workers["prefetch_factor"] = args.dataloader_prefetch_factor
        of_workers["persistent_workers"] = args.dataloader_persistent_workers
    return DataLoader(
        own.dataset,
        batch_size=args.train_batch_size,
        **order,
        collate_fn=own.collate_fn,
        drop_last=args.dataloader_drop_last,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        **of_workers,
    )


def _is_overridden(trainer: Any, name: str) -> bool:
    """Whether a Trainer has a method of its own in place of transformers'."""
    return not getattr(type(trainer), name).__module__.startswith("transformers.")
