"""Trainers of libraries on JPEG files, in bfloat16: tuned from within; then the tuned one and fixed numbers take turns.

hugging_face    `tune_trainer(trainer)`, a ViT-Large made from its configuration (nothing is downloaded)
lightning       `trainer.fit(tuned(module))`, the ResNet-18 of the study
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import LoaderConfig
from studies.gpu.jobs import JOBS, Size, resnet
from studies.gpu.training import (
    FILLED_ROUNDS,
    TUNED,
    Rate,
    Utilisation,
    bursts_of,
    in_turns,
    medians,
    record,
    synchronize,
)

FIRST_STEPS, ROUNDS = 5, 2


class Clock:
    """Times steps once the queues that were filled at the start are empty, and tells when it has been long enough."""

    def __init__(self, config: LoaderConfig, batch: int, seconds: float, device: str) -> None:
        self.batch, self.seconds, self.steps, self.device = batch, seconds, 0, torch.device(device)
        self.first = FIRST_STEPS + FILLED_ROUNDS * config.num_workers * (config.prefetch_factor or 1)

    def step(self) -> bool:
        """Note the end of a step; whether training may end."""
        self.steps += 1
        if self.steps == self.first:
            synchronize(self.device)
            self.begun = time.perf_counter()
        return self.steps > self.first and time.perf_counter() - self.begun > self.seconds

    def rate(self, train: Callable[[], object]) -> Rate:
        """Of a training that asks after each step whether it may end."""
        with Utilisation(self.device) as used:
            train()
        synchronize(self.device)
        samples_per_s = self.batch * (self.steps - self.first) / (time.perf_counter() - self.begun)
        return Rate(samples_per_s=samples_per_s, gpu_util=used.mean())


def beside_others(name: str, best: LoaderConfig, train: Callable[[LoaderConfig], Rate], workers: int) -> None:
    """Rates of the tuned configuration, of none and of so many workers, and the tuned one's over theirs."""
    some = LoaderConfig(num_workers=workers, pin_memory=True)
    sides = {"0 workers": LoaderConfig(), TUNED: best, f"{workers} workers": some}
    found = medians(in_turns(name, {side: partial(train, config) for side, config in sides.items()}, ROUNDS))
    record(name, "tuned over", best=str(best), **{side: found[TUNED] / rate for side, rate in found.items()})


class Dicts(Dataset[Any]):
    """What a model of transformers takes."""

    def __init__(self, pictures: Dataset[Any]) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels, label = self.pictures[index]
        return {"pixel_values": pixels, "labels": label}


def hugging_face(device: str, size: Size, seconds: float) -> None:
    import transformers

    from autotune_loader.integrations.transformers import training_arguments, tune_trainer

    transformers.logging.set_verbosity_error()
    job = JOBS["resnet_jpeg"](size)
    vit = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    shape = tiny if size.crop < 64 else vit
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=size.crop, patch_size=16, num_labels=10, **shape)
    )

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = clock.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=size.batch, bf16=device != "cpu", use_cpu=device == "cpu", max_steps=100_000,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Dicts(job.dataset), callbacks=[Stop()])
        result = tune_trainer(trainer, budget=15.0 if seconds > 1 else 2.0, progress=False)
        record("hugging_face", TUNED, says=list(result.summary), seconds=result.seconds, bursts=bursts_of(result))

        def train(config: LoaderConfig) -> Rate:
            nonlocal clock
            arguments.dataloader_prefetch_factor, arguments.dataloader_persistent_workers = None, False
            for name, value in training_arguments(config).items():
                setattr(arguments, name, value)
            clock = Clock(config, size.batch, seconds / 3, device)
            return clock.rate(trainer.train)

        clock = Clock(LoaderConfig(), size.batch, seconds, device)
        beside_others("hugging_face", result.best, train, max(1, (os.cpu_count() or 1) // 2))


def lightning(device: str, size: Size, seconds: float) -> None:
    import logging

    import lightning.pytorch as pl

    from autotune_loader.integrations.lightning import tuned

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    job = JOBS["resnet_jpeg"](size)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, config: LoaderConfig) -> None:
            super().__init__()
            self.model, self.config = resnet(size.width), config

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def train_dataloader(self) -> DataLoader[Any]:
            return job.loader(**self.config.to_kwargs())

    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = clock.step()

    def fit(module: Any) -> Rate:
        nonlocal clock
        clock = Clock(module.config, size.batch, seconds / 3, device)
        trainer = pl.Trainer(
            accelerator=torch.device(device).type, devices=1, precision=32 if device == "cpu" else "bf16-mixed",
            callbacks=[Stop()], max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        return clock.rate(partial(trainer.fit, module))

    clock = Clock(LoaderConfig(), size.batch, seconds, device)
    module = tuned(Module(LoaderConfig()), budget=15.0 if seconds > 1 else 2.0, progress=False)
    fit(module)
    result = module.tuning_result
    record("lightning", TUNED, says=list(result.summary), seconds=result.seconds, bursts=bursts_of(result))
    beside_others("lightning", result.best, lambda config: fit(Module(config)), os.cpu_count() or 1)
