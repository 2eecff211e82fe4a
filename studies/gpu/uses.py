"""What people do with a GPU: `python -m studies.gpu.uses [NAME ...] [--device sim --quick]`

images          AutoLoader and DataLoader with as many workers on image batches; pinned where they lie, and by torch's thread
live            AutoLoader on resnet_jpeg: rate of each eight seconds, and of the best fixed configuration beside it
lightning       a ResNet-18 tuned from within, beside fixed numbers of workers
compare         `compare()` of a plain and of a compiled model
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader, LoaderConfig
from autotune_loader.autoloader import elastic
from studies.gpu.__main__ import check_device
from studies.gpu.jobs import FULL, JOBS, QUICK, Size, resnet
from studies.gpu.training import (
    FILLED_ROUNDS,
    TUNED,
    Loop,
    Rate,
    Utilisation,
    bursts_of,
    in_turns,
    medians,
    record,
    recorded,
    synchronize,
)  # fmt: skip

FIRST_STEPS, LIGHTNING_ROUNDS = 5, 2


def images(device: str, size: Size, seconds: float) -> None:
    """Rates in turns, with the settings that people write."""
    loop, cores = Loop(JOBS["images"](size), device, seconds / 6), os.cpu_count() or 1
    few, many = (LoaderConfig(num_workers=n, pin_memory=device != "cpu") for n in (max(1, cores // 2), cores))

    def by_thread() -> Rate:
        own, elastic.pinner_for = elastic.pinner_for, lambda loader: None
        try:
            return loop.live(few)
        finally:
            elastic.pinner_for = own

    sides = {f"DataLoader, {each}": partial(loop.train, each) for each in (few, many)}
    sides |= {f"AutoLoader, {each}": partial(loop.live, each) for each in (few, many)}
    sides[f"AutoLoader, {few}, by torch's thread"] = by_thread
    recorded("images", "the step alone", loop.step())
    found = medians(in_turns("images", sides, 3))
    best = max(rate for side, rate in found.items() if side.startswith("DataLoader"))
    record("images", "over the faster DataLoader", **{side: rate / best for side, rate in found.items()})


def live(device: str, size: Size, seconds: float) -> None:
    """Share of the best fixed configuration, which runs before and after it."""
    loop, cores = Loop(JOBS["resnet_jpeg"](size), device, seconds), os.cpu_count() or 1
    fixed = [LoaderConfig(num_workers=n, pin_memory=device != "cpu") for n in (max(1, cores // 2), cores)]
    loader = AutoLoader(loop.job.dataset, pin_memory=device != "cpu", **loop.job.parts())
    before = [loop.train(config).samples_per_s for config in fixed]
    nothing_ahead, rates = LoaderConfig(), list[float]()
    for _ in range(3 if size is QUICK else 5):
        rates.append(loop.timed(loader, nothing_ahead).samples_per_s)
        record("resnet_jpeg", "live", samples_per_s=rates[-1], num_workers=loader.num_workers)
    after = [loop.train(config).samples_per_s for config in fixed]
    best = max((first + second) / 2 for first, second in zip(before, after, strict=True))
    record("resnet_jpeg", "live", of_best_fixed=rates[-1] / best, best_fixed=best, rates=rates, says=loader.report())


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


def lightning(device: str, size: Size, seconds: float) -> None:
    """`trainer.fit(tuned(module))` on the JPEG files in bfloat16; then it and fixed numbers of workers take turns."""
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
    cores = os.cpu_count() or 1
    configs = {"0 workers": LoaderConfig(), TUNED: result.best}
    configs[f"{cores} workers"] = LoaderConfig(num_workers=cores, pin_memory=True)
    sides = {side: partial(fit, Module(config)) for side, config in configs.items()}
    found = medians(in_turns("lightning", sides, LIGHTNING_ROUNDS))
    record(
        "lightning", "tuned over", best=str(result.best), **{side: found[TUNED] / rate for side, rate in found.items()}
    )


def compare(device: str, size: Size, seconds: float) -> None:
    from autotune_loader import compare as compare_sides

    job = JOBS["transformer"](size)
    loader, model = job.loader(), job.model.to(device)
    backend = "eager" if size is QUICK else "inductor"  # which knows no simulated accelerator
    models = {"plain": model, "compiled": torch.compile(model, backend=backend)}
    sides = {name: (loader, each, job.train_step) for name, each in models.items()}
    found = compare_sides(sides, device=device, budget=15.0 if seconds > 1 else 4.0)
    print(found.report(), flush=True)
    record("transformer", "compare", says=str(found))


USES = {each.__name__: each for each in (images, live, lightning, compare)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.uses", description=__doc__)
    parser.add_argument("uses", nargs="*", choices=[*USES, []], help="which; all without one")
    parser.add_argument("--device", default="cuda", help="such as cuda:1; cpu and sim with --quick")
    parser.add_argument("--quick", action="store_true", help="in small, for a test of the code")
    chosen = parser.parse_args(arguments)
    check_device(parser, chosen.device)
    warnings.simplefilter("ignore")
    failed = 0
    for name in chosen.uses or USES:
        device = chosen.device
        if name == "lightning" and device.startswith("sim"):
            print(f"{name} does not know {device}: on the CPU", flush=True)
            device = "cpu"
        try:
            USES[name](device, QUICK if chosen.quick else FULL, 0.5 if chosen.quick else 8.0)
        except Exception:  # what follows is worth its time on a machine that is lent for minutes
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
