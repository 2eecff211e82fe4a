"""One attempt: a call of `tune()` as somebody would write it with a library, and an epoch with what it chose."""

from __future__ import annotations

import importlib.metadata
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import TunerError, tune
from studies.libraries.table import LIBRARIES

# Lightning and transformers take five seconds to import, which the budget includes.
BUDGET_S = 10.0
# An advice is one of these words and what follows.
ADVICE = ("Try ", "pass ", "tune(", "make it on first use")
# Mean samples of a batch may differ by so much from what the attempt knows: the last batch of an epoch may be short.
SAME_SIZE = 0.15
WIDTH, CLASSES, BATCH, ROWS, PICTURES, SIDE, SHARDS = 16, 4, 16, 512, 128, 32, 8
LABELS = [index % CLASSES for index in range(ROWS)]


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What somebody passes to `tune()`, and how they train with the answer."""

    given: Any
    model: Any = field(default_factory=net)
    options: dict[str, Any] = field(default_factory=dict)
    """Of `tune()`."""
    epoch: Callable[[Any], Iterable[Any]] = field(default=lambda result: ())
    """Given the result, the batches of an epoch from the library's own constructor; none of what is to be refused."""
    batch: float | None = BATCH
    """Samples of a batch, where the attempt knows."""


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt."""

    outcome: str
    """`tuned`, `refused`, `wrong` or `not tried`."""
    says: str
    """What was chosen, or why nothing was."""
    notes: tuple[str, ...] = ()


# Jobs, and parts of them, that several libraries have.


def loader(make: Callable[..., Any], model: Any = None, *, batch: float | None = BATCH, **options: Any) -> Job:
    """Of a loader that `make(**kwargs)` constructs: it is constructed again with what was chosen."""
    made = {"given": make(), "epoch": lambda result: make(**result.best.to_kwargs())}
    return Job(**made, model=model or net(), batch=batch, options=options)


def loader_of(data: Any, model: Any = None, kind: Callable[..., Any] = DataLoader, **options: Any) -> Job:
    """The same, of a loader that shuffles a dataset."""
    return loader(lambda **config: kind(data, batch_size=BATCH, shuffle=True, **config), model, **options)


def dataset(data: Any, model: Any = None, **options: Any) -> Job:
    """Of a dataset that is passed with a batch size."""
    own = {"batch_size": BATCH, **options}
    return Job(given=data, model=model or net(), options=own, epoch=lambda result: result.make_loader(data))


def of_dicts(data: Any, make: Callable[..., Any] | None = None) -> Job:
    """Of a dataset of dicts, which is passed with a batch size and a step; `make` constructs the loader that trains."""
    options = {"batch_size": BATCH, "train_step": dict_step}
    return Job(given=data, options=options, epoch=lambda result: make(**result.best.to_kwargs()) if make else ())


def applied(own: Any, model: Any, **options: Any) -> Job:
    """Of a loader to which `result.apply_to()` gives what was chosen."""
    return Job(given=own, model=model, options=options, epoch=lambda result: result.apply_to(own))


def folder() -> str:
    """A place for files that the process leaves behind."""
    return tempfile.mkdtemp(prefix="autotune_loader_libraries_")


def rows() -> TensorDataset:
    return TensorDataset(torch.rand(ROWS, WIDTH), torch.tensor(LABELS))


def plain(**config: Any) -> Any:
    return DataLoader(rows(), BATCH, shuffle=True, **config)


def numbered(index: int) -> dict[str, Any]:
    """A sample, as a function that a process of a library's own can import."""
    return {"x": torch.full((WIDTH,), float(index)), "y": index % CLASSES}


def dict_step(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def bytes_step(model: Any, batch: Any) -> Any:
    pixels, classes = (each.as_subclass(torch.Tensor) for each in batch)
    return functional.cross_entropy(model(pixels.float()), classes)


def convolutions(dimensions: int = 2, channels: int = 3) -> torch.nn.Module:
    conv, pool = (getattr(torch.nn, f"{name}{dimensions}d") for name in ("Conv", "AdaptiveAvgPool"))
    layers = [conv(channels, 8, 3, stride=2), torch.nn.ReLU(), pool(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, CLASSES))


def pictures() -> str:
    """JPEG files, a folder for each class."""
    from PIL import Image

    root, random = folder(), np.random.default_rng(0)
    for index, label in enumerate(LABELS[:PICTURES]):
        Path(root, str(label)).mkdir(exist_ok=True)
        pixels = random.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"{root}/{label}/{index}.jpg")
    return root


def attempts_of(library: str) -> tuple[str, list[tuple[str, str]]]:
    """The code that makes the things of a library, and of each attempt what is passed and the expression of its job."""
    things, *attempts = LIBRARIES[library].split("\n#> ")
    return things, [(what, job) for what, _, job in (each.partition("\n") for each in attempts)]


def make_attempt(job: Job) -> Outcome:
    """Tune, and train an epoch with what was chosen."""
    try:
        result = tune(job.given, job.model, **{"budget": BUDGET_S, "progress": False, **job.options})
    except (TypeError, ValueError, TunerError) as error:
        sentence = str(error).split("\n")[0]
        return Outcome("refused" if any(word in sentence for word in ADVICE) else "wrong", sentence)
    if wrong := _what_is_wrong(job, result):
        return Outcome("wrong", wrong)
    return Outcome("tuned", f"`{result.best}`", tuple(map(str, result.warnings)))


def _what_is_wrong(job: Job, result: Any) -> str | None:
    if result.status not in ("complete", "undecided"):
        return " ".join(str(result).split())
    sizes = [trial.measurement.batch_size for trial in result.trials if trial.measurement is not None]
    if job.batch is not None and abs(sizes[0] / job.batch - 1) > SAME_SIZE:
        return f"a batch of {job.batch:g} samples was counted as {sizes[0]:g}"
    try:
        if not sum(1 for _ in job.epoch(result)):
            return "the configuration was applied, and the epoch had no batch"
        if isinstance(job.given, DataLoader) and not sum(1 for _ in job.given):
            return "the loader that was given has no batch any more"
    except Exception as error:
        return f"the configuration could not be applied: {type(error).__name__}: {error}"
    return None


def attempted(library: str, number: int) -> dict[str, Any]:
    """The outcome of a library's attempt, in its environment."""
    warnings.simplefilter("ignore")
    things, attempts = attempts_of(library)
    names = {**globals(), "__name__": "attempt_of_a_library"}
    exec(things, names)
    made = make_attempt(eval(attempts[number][1], names))
    return {"version": importlib.metadata.version(library), **asdict(made)}
