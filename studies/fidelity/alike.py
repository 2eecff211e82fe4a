"""Does a trial train as the script does? Seconds of a batch and of a step in both, for jobs that set something of their own.

    python -m studies.fidelity.alike [NAME ...]

Each job runs in a process of its own: some steps as its script trains, `tune()`, and the same steps once more. Without workers
a batch is what the loop waits for, and all of it is the script's own time. Compared are medians: of the script, before and
after, and of all trials without workers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import sqlite3
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader import TuningResult, tune
from studies.processes import NoAnswerError, last_line
from studies.workloads import WORKLOADS, spin

GOAL, STEPS, BUDGET_S, ROWS, WIDTH = 0.10, 25, 12.0, 4000, 32
SETTINGS = """
from types import SimpleNamespace
class AttrDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__
cfg, space = AttrDict(rounds=1), SimpleNamespace(rounds=1)
"""
DATA = """
import settings_of_alike
from studies.fidelity.alike import Spun
class Rows(Spun):
    def __init__(self, name): self.name = name
    def rounds(self): return getattr(settings_of_alike, self.name).rounds
"""
"""A script's modules: settings that it changes, and a dataset that reads them."""


@dataclass(frozen=True)
class Timed:
    """Seconds of each step and of the batch before it."""

    batch_s: list[float]
    step_s: list[float]


@dataclass(frozen=True)
class Job:
    """A script: how it trains for some steps, and how it is tuned."""

    train: Callable[[], Timed]
    tune: Callable[[], TuningResult]


class Spun(Dataset[Any]):
    """Samples that take some milliseconds of one core; `rounds` says how long, each time."""

    def __init__(self, rounds: Callable[[], int]) -> None:
        self.rounds = rounds

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return spin(self.rounds(), b"x" * (1 << 16), index)[0][:WIDTH], index % 2


class Dicts(Spun):
    """The same as dicts, for models that take names."""

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Stream(IterableDataset[Any]):
    """Rows that are shared out among workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, ROWS, info.num_workers if info else 1):
            yield spin(20, b"x" * (1 << 16), index)[0][:WIDTH], index % 2


class Opened(Dataset[Any]):
    """Rows of a file that is opened on first use."""

    def __init__(self, open_it: Callable[[], Callable[[int], float]]) -> None:
        self.open_it, self.read = open_it, None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read = self.read or self.open_it()
        x = spin(10, b"x" * (1 << 16), index)[0][:WIDTH]
        return x + self.read(index), index % 2


def model(width: int = WIDTH, hidden: int = 2048) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, 2)
    )


def timed(loader: Iterable[Any], step: Callable[[Any], Any]) -> Timed:
    """A plain loop."""
    found, batches = Timed([], []), iter(loader)
    for _ in range(STEPS):
        begun = time.perf_counter()
        batch = next(batches)
        fetched = time.perf_counter()
        step(batch)
        found.batch_s.append(fetched - begun)
        found.step_s.append(time.perf_counter() - fetched)
    return found


def by_hand(data: Any, net: torch.nn.Module | None = None, train_step: Any = None, **options: Any) -> Job:
    """A script with a loop of its own, cross entropy and SGD."""
    net = net or model()
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer: Any = None if train_step else torch.optim.SGD(net.parameters(), 1e-3)
    loader = (
        data if isinstance(data, DataLoader) else DataLoader(data, 16, shuffle=not isinstance(data, IterableDataset))
    )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(net(batch[0]), batch[1]).backward()
        optimizer.step()

    def tuned() -> TuningResult:
        given = {"loss_fn": loss_fn, "optimizer": optimizer} if train_step is None else {"train_step": train_step}
        return tune(loader, net, budget=BUDGET_S, progress=False, **given, **options)

    return Job(lambda: timed(loader, step if train_step is None else lambda batch: train_step(net, batch)), tuned)


def of_workload(name: str) -> Job:
    study = WORKLOADS[name]()
    return by_hand(study.loader(), study.model, study.train_step)


def own_backward() -> Job:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(net: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        optimizer.step()
        return loss

    return by_hand(Spun(lambda: 10), net, step)


def settings(name: str) -> Job:
    """Of a module whose object of settings the script has changed."""
    folder = Path(tempfile.mkdtemp())
    (folder / "settings_of_alike.py").write_text(SETTINGS)
    (folder / "data_of_alike.py").write_text(DATA)
    sys.path.insert(0, str(folder))
    data = importlib.import_module("data_of_alike")
    getattr(sys.modules["settings_of_alike"], name).rounds = 20
    return by_hand(data.Rows(name))


def database() -> Job:
    path = f"{tempfile.mkdtemp()}/rows.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, value REAL)")
        connection.executemany("INSERT INTO rows VALUES (?, ?)", [(number, float(number)) for number in range(ROWS)])
        connection.commit()

    def opened() -> Callable[[int], float]:
        connection = sqlite3.connect(path)
        return lambda index: connection.execute("SELECT value FROM rows WHERE number = ?", (index,)).fetchone()[0]

    return by_hand(Opened(opened))


def mapped() -> Job:
    path = f"{tempfile.mkdtemp()}/rows.bin"
    np.zeros(ROWS, np.float32).tofile(path)

    def opened() -> Callable[[int], float]:
        rows = np.memmap(path, dtype=np.float32, mode="r")
        return lambda index: float(rows[index])

    return by_hand(Opened(opened))


def lightning_job(*, hook: bool = False, **trainer: Any) -> Job:
    """A LightningModule with a data module, in Trainer.fit."""
    import lightning

    from autotune_loader.integrations.lightning import tuned

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Spun(lambda: 10), 16, shuffle=True)

        def on_after_batch_transfer(self, batch: Any, _index: int) -> Any:
            return (spin(200, b"x" * (1 << 16), 0) and batch) if hook else batch

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    class Clock(lightning.Callback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.marks.append(time.perf_counter())

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(time.perf_counter())

    def fit(net: Any, data: Any, steps: int) -> Clock:
        clock, quiet = (
            Clock(),
            dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=steps, callbacks=[clock], **quiet, **trainer
        ).fit(net, datamodule=data)
        return clock

    def train() -> Timed:
        marks = fit(Net(), Data(), STEPS).marks
        # A hook of the data module runs before the batch starts: what trials count as the step.
        periods = [after - before for before, after in zip(marks[1::2], marks[3::2], strict=False)]
        return Timed([], periods)

    def tune_it() -> TuningResult:
        net = Net()
        data = tuned(Data(), net, budget=BUDGET_S, progress=False)
        fit(net, data, 2)
        found: TuningResult = data.tuning_result
        return found

    return Job(train, tune_it)


def trainer_job(**options: Any) -> Job:
    """Hugging Face's Trainer over a model of some layers."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.modeling_layers import GradientCheckpointingLayer

    from autotune_loader.integrations.transformers import tune_trainer

    class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2048, 2048)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.inner(x))

    class Net(PreTrainedModel):  # type: ignore[misc]
        config_class, supports_gradient_checkpointing, main_input_name = PretrainedConfig, True, "x"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.first, self.head = torch.nn.Linear(WIDTH, 2048), torch.nn.Linear(2048, 2)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            pass

        def forward(self, x: Any, labels: Any = None) -> Any:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

    def made() -> Any:
        arguments = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=STEPS, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, use_cpu=True, **options,
        )  # fmt: skip
        return Trainer(Net(PretrainedConfig()), arguments, train_dataset=Dicts(lambda: 10))

    def train() -> Timed:
        trainer, clock = made(), Clock()
        trainer.add_callback(clock)
        trainer.train()
        return Timed([], [after - before for before, after in itertools.pairwise(clock.marks)])

    return Job(train, lambda: tune_trainer(made(), budget=BUDGET_S, progress=False))


JOBS: dict[str, Callable[[], Job]] = {
    "jpeg": lambda: of_workload("jpeg"),
    "in_memory": lambda: of_workload("in_memory"),
    "cpu_bound": lambda: of_workload("cpu_bound"),
    "wait_light_tail": lambda: of_workload("wait_light_tail"),
    "stream": lambda: by_hand(Stream()),
    "own backward": own_backward,
    "settings: an attribute dict": lambda: settings("cfg"),
    "settings: a namespace": lambda: settings("space"),
    "database opened on first use": database,
    "map opened on first use": mapped,
    "Lightning": lightning_job,
    "Lightning, hook of the data module": lambda: lightning_job(hook=True),
    "Lightning, clipped, every second step": lambda: lightning_job(gradient_clip_val=1.0, accumulate_grad_batches=2),
    "Trainer": trainer_job,
    "Trainer, gradient checkpointing": lambda: trainer_job(gradient_checkpointing=True),
    "Trainer, bf16": lambda: trainer_job(bf16=True),
}


def measure(name: str) -> dict[str, Any]:
    """Medians of one job: batch and step, or the period where a framework does not tell them apart."""
    warnings.simplefilter("ignore")
    job = JOBS[name]()
    before, result, after = job.train(), job.tune(), job.train()
    alone = [m for each in result.trials if not each.config.num_workers and (m := each.measurement)]
    said = [str(each) for each in result.warnings]
    script = {
        key: median([*getattr(before, key)[2:], *getattr(after, key)[2:]] or [0.0]) for key in ("batch_s", "step_s")
    }
    trials = {"batch_s": median(m.service_s for m in alone), "step_s": median(m.step_s for m in alone)}
    if not before.batch_s:
        trials = {"batch_s": 0.0, "step_s": median(m.service_s + m.step_s for m in alone)}
    return {"script": script, "trials": trials, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(JOBS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one)), flush=True)
        return
    print("| job | batch: script, trials | | step: script, trials | |\n|---|---|---|---|---|", flush=True)
    for name in asked.names or JOBS:
        try:
            found = json.loads(last_line("-m", "studies.fidelity.alike", "--one", name, timeout_s=180.0))
        except NoAnswerError as error:
            print(f"| {name} | no answer: {error} | | | |", flush=True)
            continue
        cells = []
        for key in ("batch_s", "step_s"):
            ours, theirs = found["trials"][key], found["script"][key]
            cells += [f"{theirs * 1e3:.2f}, {ours * 1e3:.2f} ms", f"{ours / theirs - 1:+.0%}"] if theirs else ["-", ""]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
