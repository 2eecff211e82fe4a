"""One attempt: a call of `tune()` as somebody would write it with a library, and an epoch with what it chose.

python -m studies.libraries.attempt litdata 0      # the library's first, in its environment; prints one line of JSON
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import TunerError, tune

# Lightning and transformers take five seconds to import, which the budget includes.
BUDGET_S = 10.0
# An advice is one of these words and what follows.
ADVICE = ("would work", "pass ", "tune(")
# Mean samples of a batch may differ by so much from what the attempt knows: the last batch of an epoch may be short.
SAME_SIZE = 0.15
WIDTH, CLASSES, BATCH = 16, 4, 16


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


def version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Make the attempt of this number and print its outcome as the last line; null where there is none."""
    from studies.libraries.table import LIBRARIES

    warnings.simplefilter("ignore")
    library, number = sys.argv[1:]
    attempts = list(LIBRARIES[library]().items())[int(number) :]
    answer = None
    if attempts:
        what, make = attempts[0]
        answer = {"what": what, "version": version_of(library), **asdict(make_attempt(make()))}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
