"""Does a trial train as the script does? Seconds of a batch and of a step in both, for jobs that set something of their own.

    python -m studies fidelity.alike [--only NAME]

Each job runs in a process of its own: some steps as its script trains, `tune()`, and the same steps once more. Without workers
a batch is what the loop waits for, and all of it is the script's own time. Compared are medians: of the script, before and
after, and of all trials without workers.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autotune_loader import TuningResult, tune
from studies.processes import NoAnswerError, answer
from studies.study import Row, Table
from studies.workloads import WORKLOADS, Items, spin

GOAL, STEPS, BUDGET_S, ROWS, WIDTH = 0.10, 25, 12.0, 4000, 32
BAR = "each batch and each step within 10%"


class Timed(NamedTuple):
    """Seconds of each step and of the batch before it."""

    batch_s: list[float]
    step_s: list[float]


class Job(NamedTuple):
    """A script: how it trains for some steps, and how it is tuned."""

    train: Callable[[], Timed]
    tune: Callable[[], TuningResult]


def sample(index: int, rounds: int = 10) -> tuple[torch.Tensor, int]:
    """Some milliseconds of one core."""
    return spin(rounds, b"x" * (1 << 16), index)[0][:WIDTH], index % 2


def as_dict(index: int) -> dict[str, Any]:
    """For models that take names."""
    x, y = sample(index)
    return {"x": x, "labels": y}


class Stream(IterableDataset[Any]):
    """Rows that are shared out among workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, ROWS, info.num_workers if info else 1):
            yield sample(index, 20)


def model(hidden: int = 2048) -> torch.nn.Module:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(WIDTH, hidden), torch.nn.ReLU(), linear(hidden, hidden), linear(hidden, 2))


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


def by_hand(loader: Any, net: torch.nn.Module, train_step: Any = None) -> Job:
    """A script with a loop of its own, with cross entropy and SGD where it has no step."""
    loss_fn, given = torch.nn.CrossEntropyLoss(), {"train_step": train_step}
    if train_step is None:
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        given = {"loss_fn": loss_fn, "optimizer": optimizer}

    def step(net: Any, batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(net(batch[0]), batch[1]).backward()
        optimizer.step()

    def tuned() -> TuningResult:
        return tune(loader, net, budget=BUDGET_S, progress=False, **given)

    return Job(lambda: timed(loader, lambda batch: (train_step or step)(net, batch)), tuned)


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

    return by_hand(DataLoader(Items(sample, ROWS), 16, shuffle=True), net, step)


def lightning_job(*, hook: bool = False, **trainer: Any) -> Job:
    """A LightningModule with a data module, in Trainer.fit."""
    import lightning

    from autotune_loader.integrations.lightning import tuned

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Items(sample, ROWS), 16, shuffle=True)

        def on_after_batch_transfer(self, batch: Any, _index: int) -> Any:
            return (sample(0, 200) and batch) if hook else batch

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

        on_train_batch_end = on_train_batch_start

    def fit(net: Any, data: Any, steps: int) -> Clock:
        names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        clock, given = Clock(), {**dict.fromkeys(names, False), "accelerator": "cpu", "devices": 1, **trainer}
        loop = lightning.Trainer(max_epochs=1, limit_train_batches=steps, callbacks=[clock], **given)
        loop.fit(net, datamodule=data)
        return clock

    def train() -> Timed:
        marks = fit(Net(), Data(), STEPS).marks
        # A hook of the data module runs before the batch starts: what trials count as the step.
        periods = [after - before for before, after in zip(marks[1::2], marks[3::2], strict=False)]
        return Timed([], periods)

    def tune_it() -> TuningResult:
        data = tuned(Data(), net := Net(), budget=BUDGET_S, progress=False)
        fit(net, data, 2)
        return data.tuning_result  # type: ignore[no-any-return]

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
        return Trainer(Net(PretrainedConfig()), arguments, train_dataset=Items(as_dict, ROWS))

    def train() -> Timed:
        trainer, clock = made(), Clock()
        trainer.add_callback(clock)
        trainer.train()
        return Timed([], [after - before for before, after in itertools.pairwise(clock.marks)])

    return Job(train, lambda: tune_trainer(made(), budget=BUDGET_S, progress=False))


JOBS: dict[str, Callable[[], Job]] = {
    **{name: partial(of_workload, name) for name in ("jpeg", "in_memory", "cpu_bound", "wait_light_tail")},
    "stream": lambda: by_hand(DataLoader(Stream(), 16), model()),
    "own backward": own_backward,
    "Lightning": lightning_job,
    "Lightning, hook of the data module": lambda: lightning_job(hook=True),
    "Lightning, clipped, every second step": lambda: lightning_job(gradient_clip_val=1.0, accumulate_grad_batches=2),
    "Trainer": trainer_job,
    "Trainer, gradient checkpointing": lambda: trainer_job(gradient_checkpointing=True),
    "Trainer, bf16": lambda: trainer_job(bf16=True),
}


def measure(name: str) -> dict[str, Any]:
    """Medians of one job, in a process of its own: batch and step, or the period where a framework does not tell them apart."""
    warnings.simplefilter("ignore")
    job = JOBS[name]()
    before, result, after = job.train(), job.tune(), job.train()
    alone = [m for each in result.trials if not each.config.num_workers and (m := each.measurement)]
    script = {key: [*getattr(before, key)[2:], *getattr(after, key)[2:]] for key in ("batch_s", "step_s")}
    trials = {"batch_s": median(m.service_s for m in alone), "step_s": median(m.step_s for m in alone)}
    if not before.batch_s:
        trials["step_s"] += trials["batch_s"]
    return {"script": {key: median(each) for key, each in script.items() if each}, "trials": trials}


def rows(*, only: str = "", quick: bool = False) -> Table:
    for name in [each for each in JOBS if only in each][: 1 if quick else None]:
        found, cells, is_met = {"script": {}, "trials": {}}, {"job": name}, True
        try:
            found = answer(measure, timeout_s=180.0, environ={"OMP_NUM_THREADS": "1"}, name=name)
        except NoAnswerError as error:
            yield f"{name}: no answer: {error}"
            continue
        for key in ("batch_s", "step_s"):
            theirs, ours = found["script"].get(key), found["trials"][key]
            cells[f"{key[:-2]}: script, trials"] = f"{theirs * 1e3:.2f}, {ours * 1e3:.2f} ms" if theirs else "-"
            cells[f"{key[:-2]} apart"] = f"{ours / theirs - 1:+.0%}" if theirs else "-"
            is_met &= not theirs or abs(ours / theirs - 1) <= GOAL
        yield Row(cells, is_met)
