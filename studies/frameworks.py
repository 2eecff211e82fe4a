"""How fast does each framework train with its default loader, and how fast as tuned? The loop is the framework's own.

    .venv/bin/python -m studies.frameworks           # about four minutes; the table goes to studies/results/frameworks.md
    .venv/bin/python -m studies.frameworks --device cuda --only "Lightning,HF Trainer"

Each framework tunes once through its integration; then default and tuned take turns in a random order, an epoch each. The
rate is counted inside the model, from batch 41 to the last, so that queues filled during start-up do not flatter anyone.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import LoaderConfig, tune
from autotune_loader.pipeline.build import rebuild
from autotune_loader.values.statistics import Round, paired_ratio
from studies.workloads import SleepDataset

SAMPLES, BATCH, SKIPPED = 2048, 16, 40
ROUNDS = 3
BUDGET_S = 10.0
RESULTS = Path(__file__).parent / "results" / "frameworks.md"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training loop, with and without tuning."""

    name: str
    tune: Callable[[], LoaderConfig]
    train: Callable[[LoaderConfig | None], list[float]]
    """Seconds at which each step began; None is the framework's default configuration."""


class Net(torch.nn.Module):
    """A small model that notes when each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 10)
        self.times: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.times.append(time.perf_counter())
        logits = self.layer(x)
        return logits if labels is None else {"loss": torch.nn.functional.cross_entropy(logits, labels)}


class Delay:
    """What Hugging Face datasets apply to a batch of rows: the same wait per sample as the other frameworks' dataset."""

    def __init__(self) -> None:
        self.source = dataset()

    def __call__(self, rows: dict[str, list[int]]) -> dict[str, Any]:
        samples = [self.source[index] for index in rows["index"]]
        return {"x": [x for x, _ in samples], "labels": [y for _, y in samples]}


def dataset() -> SleepDataset:
    return SleepDataset(SAMPLES, 0.002, sigma=0.3)


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}


def loop(loader: Any) -> list[float]:
    """The plain training loop."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in loader:
        x, y = batch if isinstance(batch, (list, tuple)) else (batch["x"], batch["labels"])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.times


def plain() -> Framework:
    own = DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    return Framework(
        name="plain PyTorch",
        tune=lambda: tune(own, Net(), budget=BUDGET_S, reuse=False, progress=False).best,
        train=lambda config: loop(own if config is None else rebuild(own, config)),
    )


def torchdata() -> Framework:
    from torchdata.stateful_dataloader import StatefulDataLoader

    own = StatefulDataLoader(dataset(), batch_size=BATCH, shuffle=True)
    return Framework(
        name="torchdata",
        tune=lambda: tune(own, Net(), budget=BUDGET_S, reuse=False, progress=False).best,
        train=lambda config: loop(own if config is None else rebuild(own, config)),
    )


def lightning(on_cpu: bool = True) -> Framework:
    import lightning.pytorch as pl

    from autotune_loader.integrations.lightning import tuned

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(config: LoaderConfig | None, budget: float | None = None) -> tuple[list[float], Any]:
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu" if on_cpu else "gpu", devices=1, enable_model_summary=False, **options
        )
        module, loader = Module(), DataLoader(dataset(), batch_size=BATCH, shuffle=True)
        data = tuned(
            module,
            loader,
            config=config or (None if budget else LoaderConfig()),
            budget=budget or 1,
            reuse=False,
            progress=False,
        )
        trainer.fit(module, datamodule=data)
        return module.net.times, data.result

    return Framework(
        name="Lightning",
        tune=lambda: fit(None, BUDGET_S)[1].best,
        train=lambda config: fit(config)[0],
    )


def transformers(on_cpu: bool = True) -> Framework:
    import transformers as hf

    from autotune_loader.integrations.transformers import training_arguments, tune_trainer

    def trainer(config: LoaderConfig | None) -> Any:
        fields = {} if config is None else training_arguments(config)
        args = hf.TrainingArguments(
            tempfile.gettempdir(), per_device_train_batch_size=BATCH, num_train_epochs=1, use_cpu=on_cpu, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, **fields,
        )  # fmt: skip
        return hf.Trainer(Net(), args, train_dataset=dataset(), data_collator=collate)

    def train(config: LoaderConfig | None) -> list[float]:
        made = trainer(config)
        made.train()
        return list(made.model.times)

    return Framework(
        name="HF Trainer",
        tune=lambda: tune_trainer(trainer(None), budget=BUDGET_S, reuse=False, progress=False).best,
        train=train,
    )


def accelerate() -> Framework:
    from accelerate import Accelerator

    from autotune_loader.integrations.accelerate import tune_before_prepare

    def own() -> Any:
        return DataLoader(dataset(), batch_size=BATCH, shuffle=True)

    def train(config: LoaderConfig | None) -> list[float]:
        loader = Accelerator(cpu=True).prepare(own() if config is None else rebuild(own(), config))
        return loop(loader)

    def tuned() -> LoaderConfig:
        return tune_before_prepare(Accelerator(cpu=True), own(), Net(), budget=BUDGET_S, reuse=False, progress=False)[
            1
        ].best

    return Framework(name="Accelerate", tune=tuned, train=train)


def datasets(iterable: bool) -> Framework:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = Dataset.from_dict({"index": list(range(SAMPLES))})
    if iterable:
        made = (
            rows.to_iterable_dataset(num_shards=16)
            .with_format("torch")
            .map(Delay(), batched=True, batch_size=BATCH, remove_columns=["index"])
        )
        own = DataLoader(made, batch_size=BATCH)
    else:
        own = DataLoader(rows.with_transform(Delay()), batch_size=BATCH, shuffle=True)
    return Framework(
        name="HF datasets, " + ("iterable, 16 shards" if iterable else "map-style"),
        tune=lambda: tune(own, Net(), budget=BUDGET_S, reuse=False, progress=False).best,
        train=lambda config: loop(own if config is None else rebuild(own, config)),
    )


def rate(times: list[float]) -> float:
    return (len(times) - 1 - SKIPPED) * BATCH / (times[-1] - times[SKIPPED])


def measure(framework: Framework, order: random.Random) -> str:
    """One row of the table."""
    config = framework.tune()
    rounds = []
    for _ in range(ROUNDS):
        arms: list[tuple[str, LoaderConfig | None]] = [("default", None), ("tuned", config)]
        order.shuffle(arms)
        rounds.append(Round(rates={name: rate(framework.train(arm)) for name, arm in arms}))
    ratio = paired_ratio(rounds, "tuned", "default")
    means = {name: sum(each.rates[name] for each in rounds) / ROUNDS for name in ("default", "tuned")}
    return (
        f"| {framework.name} | {means['default']:,.0f} | {means['tuned']:,.0f} | {ratio.value:.1f}x "
        f"({ratio.low:.1f} to {ratio.high:.1f}) | {config} |"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.frameworks")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of Lightning and the HF Trainer")
    parser.add_argument("--only", help="names of frameworks, by commas")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    on_cpu = chosen.device == "cpu"
    made: dict[str, Callable[[], Framework]] = {
        "plain PyTorch": plain,
        "torchdata": torchdata,
        "Lightning": lambda: lightning(on_cpu),
        "HF Trainer": lambda: transformers(on_cpu),
        "Accelerate": accelerate,
        "datasets": lambda: datasets(iterable=False),
        "iterable datasets": lambda: datasets(iterable=True),
    }
    names = list(made) if chosen.only is None else chosen.only.split(",")
    if unknown := [name for name in names if name not in made]:
        parser.exit(2, f"--only: {unknown[0]!r} is none of {', '.join(made)}\n")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    where = "cpu" if on_cpu else torch.cuda.get_device_name().lower().replace(" ", "-")
    order = random.Random(0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    head = [
        "# Frameworks: default against tuned",
        "",
        f"`studies/frameworks.py` on `{os.cpu_count()}c-{memory:.0f}g-{where}` ({platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}), {time.strftime('%Y-%m-%d')}. {SAMPLES} samples that wait "
        f"about 2 ms each, batch {BATCH}, {ROUNDS} paired rounds, budget {BUDGET_S:.0f} s, 95 % intervals of the ratio.",
        "",
        "| framework | default, samples/s | tuned, samples/s | paired ratio | tuned configuration |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(head))
    rows = []
    for name in names:
        rows.append(measure(made[name](), order))
        print(rows[-1], flush=True)
    chosen.out.parent.mkdir(exist_ok=True, parents=True)
    chosen.out.write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    main()
