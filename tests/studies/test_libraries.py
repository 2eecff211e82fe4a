"""The matrix of libraries: what is kept of it is whole, and an attempt ends in one of its ways."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from msgspec import to_builtins
from torch import zeros
from torch.utils.data import TensorDataset, default_collate

from studies.libraries.__main__ import MODULES
from studies.libraries.attempt import Attempt, Attempts, Job, Outcome, make_attempt
from studies.libraries.environments import ENVIRONMENTS
from studies.libraries.page import row, rows_by_library


def test_the_kept_table_has_an_explained_row_for_every_attempt() -> None:
    rows = rows_by_library()
    attempts: list[Attempt] = []
    for module in MODULES:
        made: Attempts = importlib.import_module(f"studies.libraries.{module}").ATTEMPTS
        attempts += made.values()

    kept = [line.split(" | ") for lines in rows.values() for line in lines]
    assert set(rows) <= {each.library for each in ENVIRONMENTS}
    assert len(rows) >= 18
    assert sorted(what for _, what, *_ in kept) == sorted(each.what for each in attempts)
    assert [row for row in kept if row[2] not in ("tuned", "refused") or len(row[3]) < 5] == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "batch", "outcome", "says"),
    [
        (TensorDataset(zeros(16, 2)), 4, "tuned", "Use "),
        (TensorDataset(zeros(16, 2)), 8, "wrong", "a batch of 8 samples was counted as 4"),
        (42, 4, "refused", "would work"),
    ],
)
def test_an_attempt_is_tuned_refused_or_wrong(given: Any, batch: int, outcome: str, says: str) -> None:
    options = {"batch_size": 4, "budget": 2, "max_trials": 1, "isolation": "inline", "collate_fn": default_collate}
    job = Job(given=given, options=options, batch=batch, epoch=lambda result: result.make_loader(given))
    made = make_attempt(Attempt(library="torch", what="something", make=lambda: job))

    assert made.outcome == outcome
    assert says in made.sentence
    assert Outcome(**json.loads(json.dumps(to_builtins(made)))).config == made.config
    assert f"| {outcome} |" in row(made)
