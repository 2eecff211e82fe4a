"""What people do with a GPU: `python -m studies.gpu.uses [NAME ...] [--device sim --quick]`

images          AutoLoader and DataLoader with as many workers on image batches; pinned where they lie, and by torch's thread
live            AutoLoader on resnet_jpeg: rate of each eight seconds, and of the best fixed configuration beside it
lightning       a ResNet-18 tuned from within, beside fixed numbers of workers
hugging_face    the same of a ViT and `tune_trainer(trainer)`; the ViT is made from its configuration, nothing is downloaded
compare         `compare()` of a plain and of a compiled model
watch           is the wait that `autotune-loader watch` names the device's, whatever the host waits for?
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune_loader import AutoLoader, LoaderConfig, TuningResult
from autotune_loader.autoloader import iterator
from autotune_loader.pipeline.batches import accelerator
from studies.gpu.jobs import FULL, JOBS, QUICK, Size, resnet
from studies.gpu.training import (
    FILLED_ROUNDS,
    TUNED,
    Loop,
    Rate,
    Utilisation,
    attempted,
    in_turns,
    medians,
    parsed,
    record,
    record_result,
    recorded,
    synchronize,
)  # fmt: skip
from studies.workloads import Items

FIRST_STEPS, TRAINER_ROUNDS = 5, 2
WAITS_S, MOST_APART = {"ahead": 0.02, "behind": 0.08}, 0.1
"""Of a worker for a batch, where two workers are ahead of a step of 20 ms and behind it; and the bar of `watch`."""


def images(device: str, size: Size, seconds: float) -> None:
    """Rates in turns, with the settings that people write."""
    loop, cores = Loop(JOBS["images"](size), device, seconds / 6), os.cpu_count() or 1
    few, many = (LoaderConfig(num_workers=n, pin_memory=device != "cpu") for n in (max(1, cores // 2), cores))

    def by_thread() -> Rate:
        own, iterator.pinner_for = iterator.pinner_for, lambda loader: None
        try:
            return loop.live(few)
        finally:
            iterator.pinner_for = own

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


def beside_others(name: str, result: TuningResult, train: Callable[[LoaderConfig], Rate]) -> None:
    """The tuned configuration, none and as many workers as cores take turns; the tuned one's rate over theirs."""
    record_result(name, result)
    cores = os.cpu_count() or 1
    configs = {"0 workers": LoaderConfig(), TUNED: result.best}
    configs[f"{cores} workers"] = LoaderConfig(num_workers=cores, pin_memory=True)
    sides = {side: partial(train, config) for side, config in configs.items()}
    found = medians(in_turns(name, sides, TRAINER_ROUNDS))
    record(name, "tuned over", **{side: found[TUNED] / rate for side, rate in found.items()})


def lightning(device: str, size: Size, seconds: float) -> None:
    """`trainer.fit(tuned(module))` on the JPEG files in bfloat16; then it and fixed numbers of workers take turns."""
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

        def train_dataloader(self) -> Any:
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
    beside_others("lightning", module.tuning_result, lambda config: fit(Module(config)))


def hugging_face(device: str, size: Size, seconds: float) -> None:
    import transformers

    from autotune_loader.integrations.transformers import training_arguments, tune_trainer

    transformers.logging.set_verbosity_error()
    job = JOBS["resnet_jpeg"](size)
    layers, hidden, heads = (24, 1024, 16) if size is FULL else (1, 32, 2)  # ViT-Large, or hardly any
    vit = transformers.ViTConfig(
        image_size=size.crop, patch_size=16, num_labels=10, num_hidden_layers=layers, hidden_size=hidden,
        num_attention_heads=heads, intermediate_size=4 * hidden,
    )  # fmt: skip

    def as_dict(index: int) -> dict[str, Any]:
        return dict(zip(("pixel_values", "labels"), job.dataset[index], strict=True))

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = clock.step()

    def train(config: LoaderConfig) -> Rate:
        nonlocal clock
        arguments.dataloader_prefetch_factor, arguments.dataloader_persistent_workers = None, False
        for name, value in training_arguments(config).items():
            setattr(arguments, name, value)
        clock = Clock(config, size.batch, seconds / 3, device)
        return clock.rate(trainer.train)

    clock, model = Clock(LoaderConfig(), size.batch, seconds, device), transformers.ViTForImageClassification(vit)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=size.batch, bf16=device != "cpu", use_cpu=device == "cpu",
            max_steps=100_000, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        data = Items(as_dict, len(job.dataset))  # type: ignore[arg-type]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Stop()])
        result = tune_trainer(trainer, budget=15.0 if seconds > 1 else 2.0, progress=False)
        beside_others("hugging_face", result, train)


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


def watch(device: str, size: Size, seconds: float) -> None:
    """Run `watched` as a script of somebody's under it, with a loader that is ahead of the step and with one behind it."""
    if accelerator(device) is None:
        print("watch: a CPU has no clock but the host's", flush=True)
        return
    apart = dict[str, float]()
    for name, wait_s in WAITS_S.items():
        with tempfile.TemporaryDirectory() as folder:
            script, output = Path(folder, "train.py"), Path(folder, "loader.json")
            given = f"{device!r}, {size is QUICK}, {3 + seconds}, {wait_s}"
            script.write_text(f"from studies.gpu import uses\n\nprint(uses.watched({given}))\n")
            command = [sys.executable, "-W", "ignore", "-m", "autotune_loader", "watch", "-o", str(output), str(script)]
            done = subprocess.run(command, text=True, capture_output=True, timeout=110, check=False)
            print(done.stdout + done.stderr, flush=True)
            if done.returncode:
                raise RuntimeError(f"watch ended with {done.returncode}")
            named = TuningResult.load(output).wait_share or 0.0
        device_idle, host_waits = map(float, done.stdout.splitlines()[0].split())
        apart[name] = abs(named - device_idle)
        record("transformer", f"watch, {name}", named=named, device_idle=device_idle, host_waits=host_waits)
    if max(apart.values()) > MOST_APART:
        raise RuntimeError(f"watch is off by {apart}; at most {MOST_APART} is its bar")


def watched(device: str, is_quick: bool, seconds: float, wait_s: float) -> str:
    """Train without ever waiting for the device; the shares in which it was idle, by its own events, and the host waited."""
    size = QUICK if is_quick else FULL
    job = JOBS["transformer"](size)
    tokens = [job.dataset[index] for index in range(64)]
    data = Items(lambda index: time.sleep(wait_s / size.batch) or tokens[index % 64], 65536)
    model, module = job.model.to(device), accelerator(device)
    optimizer, events = torch.optim.SGD(model.parameters(), lr=0.01), list[Any]()
    begun, waited_s, asked = time.perf_counter(), 0.0, time.perf_counter()
    for batch in replace(job, dataset=data).loader(num_workers=2, pin_memory=True):
        got = time.perf_counter()
        waited_s += got - asked
        events.append(module.Event(enable_timing=True))
        events[-1].record()
        optimizer.zero_grad()
        job.train_step(model, batch).backward()
        optimizer.step()
        events.append(module.Event(enable_timing=True))
        events[-1].record()
        asked = time.perf_counter()
        if asked - begun > seconds:
            break
    synchronize(torch.device(device))
    busy_ms = sum(start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=True))
    return f"{1 - busy_ms / events[0].elapsed_time(events[-1])} {waited_s / (asked - begun)}"


USES = {each.__name__: each for each in (images, live, lightning, hugging_face, compare, watch)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.uses", description=__doc__)
    parser.add_argument("uses", nargs="*", choices=[*USES, []], help="which; all without one")
    chosen = parsed(parser, arguments)
    warnings.simplefilter("ignore")
    failed = 0
    for name in chosen.uses or USES:
        device = chosen.device
        if name in ("hugging_face", "lightning") and device.startswith("sim"):
            print(f"{name} does not know {device}: on the CPU", flush=True)
            device = "cpu"
        size, seconds = (QUICK, 0.5) if chosen.quick else (FULL, 8.0)
        failed += not attempted(name, partial(USES[name], device, size, seconds))
    return failed


if __name__ == "__main__":
    sys.exit(main())
