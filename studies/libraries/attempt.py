"""One attempt: a call of `tune()` as somebody would write it with a library, and an epoch with what it chose.

    python -m studies.libraries.attempt streams litdata_dataset      # prints one line of JSON

`Job` is what an attempt is made of; `main()` is the process that makes one, in the environment of its library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

# Lightning and transformers take five seconds to import, which the budget includes.
BUDGET_S = 10.0
# An advice is one of these words and what follows.
ADVICE = ("would work", "pass ", "tune(")
# Mean samples of a batch may differ by so much from what the attempt knows: the last batch of an epoch may be short.
SAME_SIZE = 0.15


@dataclass(frozen=True, kw_only=True)
class Job:
    """What somebody passes to `tune()`, and how they train with the answer."""

    given: Any
    model: Any = None
    epoch: Callable[[Any], Iterable[Any]] = field(default=lambda result: ())
    """Given the result, the batches of an epoch from the library's own constructor; none of what is to be refused."""
    options: dict[str, Any] = field(default_factory=dict)
    batch: float | None = None
    """Samples of a batch, where the attempt knows."""
    after: Callable[[], object] | None = None
    """Checks that what was given still works."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A row of the table."""

    library: str
    what: str
    """What is passed to `tune()`, in the words of somebody who uses the library."""
    make: Callable[[], Job]


class Attempts(dict[str, Attempt]):
    """The attempts of a module, by the name of the function that makes the job."""

    def of(self, library: str, what: str) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
        """Take a function in."""

        def taken(make: Callable[[], Job]) -> Callable[[], Job]:
            self[make.__name__] = Attempt(library=library, what=what, make=make)
            return make

        return taken


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of an attempt; one line of results.jsonl."""

    library: str
    version: str
    what: str
    outcome: Literal["tuned", "refused", "wrong", "not tried"]
    sentence: str
    """Of a refusal: what to pass instead. Of a wrong one: what was wrong. Else what the result says."""
    config: str | None = None
    notes: tuple[str, ...] = ()
    epoch_ok: bool | None = None
    seconds: float = 0.0


def version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def make_attempt(attempt: Attempt) -> Outcome:
    """Tune, and train an epoch with what was chosen."""
    from autotune_loader import tune
    from autotune_loader.values.errors import TunerError

    fields: dict[str, Any] = {"library": attempt.library, "version": version_of(attempt.library), "what": attempt.what}
    job = attempt.make()
    begun = time.monotonic()
    try:
        result = tune(job.given, job.model, **{"budget": BUDGET_S, "progress": False, **job.options})
    except (TypeError, ValueError, TunerError) as error:
        sentence = str(error).split("\n")[0]
        says = "refused" if any(word in sentence for word in ADVICE) else "wrong"
        return Outcome(**fields, outcome=says, sentence=sentence, seconds=round(time.monotonic() - begun, 1))
    seconds, notes = round(time.monotonic() - begun, 1), tuple(map(str, result.warnings))
    fields |= {"seconds": seconds, "config": str(result.best), "notes": notes}
    wrong = _what_is_wrong(job, result)
    sentence = wrong or str(result).partition(".")[0]
    return Outcome(**fields, outcome="wrong" if wrong else "tuned", sentence=sentence, epoch_ok=not wrong)


def _what_is_wrong(job: Job, result: Any) -> str | None:
    if result.status not in ("complete", "undecided"):
        return " ".join(str(result).split())
    sizes = [trial.measurement.batch_size for trial in result.trials if trial.measurement is not None]
    if job.batch is not None and abs(sizes[0] / job.batch - 1) > SAME_SIZE:
        return f"a batch of {job.batch:g} samples was counted as {sizes[0]:g}"
    try:
        if not sum(1 for _ in job.epoch(result)):
            return "the configuration was applied, and the epoch had no batch"
        if job.after is not None:
            job.after()
    except Exception as error:
        return f"the configuration could not be applied: {type(error).__name__}: {error}"
    return None


def main() -> None:
    """Make one attempt and print its outcome as the last line."""
    from msgspec import to_builtins

    warnings.simplefilter("ignore")
    module, name = sys.argv[1:]
    attempts: dict[str, Attempt] = importlib.import_module(f"studies.libraries.{module}").ATTEMPTS
    print(json.dumps(to_builtins(make_attempt(attempts[name]))), flush=True)


if __name__ == "__main__":
    main()
