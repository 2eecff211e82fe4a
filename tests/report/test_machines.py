from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.machines import render_machines

TUNED_ON = Fingerprint(usable_cores=8, memory_bytes=32 << 30, gpus=("H100",), driver="550.1", torch="2.6.0")
HERE = replace(TUNED_ON, usable_cores=4, driver="560.2")
WORDS = "Tuned on: 8 cores, 32 GiB, H100, torch 2.6.0."


@pytest.mark.parametrize(
    ("tuned_on", "here", "begins"),
    [
        (TUNED_ON, TUNED_ON, [WORDS, "This machine is the same in all that matters."]),
        (TUNED_ON, HERE, [WORDS, "! usable cores: 8 then, 4 here", "~ driver: 550.1 then, 560.2 here"]),
        (None, TUNED_ON, ["The file does not say on which machine it was tuned."]),
    ],
    ids=["the same", "what matters comes first", "not said"],
)
def test_says_where_it_was_tuned_and_what_differs_here(
    tuned_on: Fingerprint | None, here: Fingerprint, begins: list[str]
) -> None:
    lines = render_machines(tuned_on, here).splitlines()
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
