from __future__ import annotations

from dataclasses import replace

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.machines import render_machines

TUNED_ON = Fingerprint(
    usable_cores=8,
    memory_bytes=32 << 30,
    gpus=("H100",),
    driver="550.1",
    thread_env={"OMP_NUM_THREADS": "1"},
)


def test_draws_both_machines_and_explains_what_differs() -> None:
    # GIVEN half the cores, a newer driver, and everything else the same
    here = replace(TUNED_ON, usable_cores=4, driver="560.2")
    # WHEN they are compared
    lines = render_machines(TUNED_ON, here).splitlines()
    # THEN the rows are side by side, and what matters comes first
    rows = [" ".join(line.split()) for line in lines]
    assert "! usable cores 8 4" in rows
    assert "memory 32 GiB 32 GiB" in rows
    assert "thread env OMP_NUM_THREADS=1 OMP_NUM_THREADS=1" in rows
    assert lines[-2].startswith("! usable cores: 8 then, 4 here")
    assert lines[-1].startswith("~ driver: 550.1 then, 560.2 here")


def test_the_same_machine_is_said_to_be_the_same() -> None:
    text = render_machines(TUNED_ON, TUNED_ON)
    assert text.endswith("This machine is the same in all that matters.")
    assert "!" not in text


def test_a_file_without_a_machine_says_so() -> None:
    assert render_machines(None) == "The file does not say on which machine it was tuned."
