"""What a script's report says: what its loops show of a loader, the command that may pay, a block as drawn, options."""

from __future__ import annotations

import os
import re
from typing import Any

import click
import pytest

from autotune_loader.autoloader.log import Totals
from autotune_loader.cli.watch import run_command, watch_command
from autotune_loader.diagnosis import Advice, Bottleneck, Kept
from autotune_loader.pipeline.site import Site
from autotune_loader.report.script import LoaderReport, ScriptReport
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError
from autotune_loader.values.lines import Line
from autotune_loader.values.statistics import Interval
from autotune_loader.watch import report
from autotune_loader.watch.run_plan import Plan
from autotune_loader.watch.script_loader import CpuTimes, ScriptLoader
from autotune_loader.watch.session import Session

SITE = Site(line=Line("/x/train.py", 15), dataset="Images", samples=4000, batch_size=8, is_shuffled=True)


def loader_of(workers: int, **more: Any) -> ScriptLoader:
    """500 batches of 8 in 10 s of one epoch; the loop waits 41 % of it, and a fetch takes 8.2 ms, 1 ms of it of CPU."""
    known = ScriptLoader(SITE, "train.py:15", LoaderConfig(num_workers=workers), lambda _: None)
    figures = {"epochs": 1, "batches": 500, "samples": 4000, "waited_s": 4.1, "started_s": 0.01, "stepped_s": 5.9}
    known.log.totals = Totals(**{**figures, **{name: value for name, value in more.items() if name in figures}})
    for clocked, cpu_s in ((known.in_loop, more.get("loop_cpu_s", 0.001)), (known.in_workers, 0.001)):
        clocked.add(1, CpuTimes(0.0, 0.0), CpuTimes(cpu_s, more.get("queued_s", 0.0)))
    known.read_s, known.busy_s = 10.0, more.get("busy_s", 5.0)
    return known


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "usable_cores", lambda: type("Cores", (), {"usable": 4}))


def told_of(known: ScriptLoader, verb: Any = "watch") -> LoaderReport:
    session = Session(Plan(verb=verb, script="train.py"))
    session.loaders.append(known)
    (found,) = report.report_of(session).loaders
    return found


CPU_BOUND = {"loop_cpu_s": 0.008}
RUN_WITH_WORKERS, RUN = Advice.RUN_WITH_WORKERS.kind, Advice.RUN.kind


@pytest.mark.parametrize(
    ("known", "bottleneck", "command"),
    [
        (loader_of(0), Bottleneck.STORAGE, RUN_WITH_WORKERS),
        (loader_of(0, **CPU_BOUND), Bottleneck.CPU, RUN_WITH_WORKERS),
        (loader_of(0, loop_cpu_s=0.004, queued_s=0.004), Bottleneck.CPU, RUN_WITH_WORKERS),
        (loader_of(2), Bottleneck.STORAGE, RUN),
        (loader_of(2, queued_s=0.039, busy_s=39.0), Bottleneck.CPU, RUN),
        (loader_of(2, loop_cpu_s=0.008), Bottleneck.HAND_OVER, RUN),
        (loader_of(0, waited_s=0.04), Bottleneck.STEP, None),
        (loader_of(0, batches=2), Bottleneck.TOO_SHORT, None),
        (loader_of(0, stepped_s=0.0), Bottleneck.NO_STEP, None),
        (loader_of(0, waited_s=0.3, stepped_s=0.1), Bottleneck.IN_MEMORY, None),
        (loader_of(0, started_s=2.0, epochs=10), Bottleneck.START_UP, None),
    ],
)
def test_the_command_that_tries_more_is_named_where_it_could_pay(
    known: ScriptLoader, bottleneck: Bottleneck, command: str | None, four_cores: None
) -> None:
    found = told_of(known)

    assert bottleneck.said_by(found.bottleneck), found.bottleneck
    named = [each.kind for each in found.advice if each.kind in (RUN, RUN_WITH_WORKERS)]
    assert named == ([command] if command else [])
    assert not any("x as fast" in each.sentence and "at most" not in each.sentence for each in found.advice)


def test_one_core_gains_nothing_from_workers_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "usable_cores", lambda: type("Cores", (), {"usable": 1}))
    assert RUN_WITH_WORKERS not in [each.kind for each in told_of(loader_of(0, **CPU_BOUND)).advice]
    assert RUN_WITH_WORKERS in [each.kind for each in told_of(loader_of(0)).advice]


def test_a_loader_that_the_script_hardly_waits_for_is_left_alone(four_cores: None) -> None:
    main, other = loader_of(0), loader_of(0, batches=10, samples=80, waited_s=0.08, stepped_s=0.01)
    session = Session(Plan(verb="watch", script="train.py"))
    session.loaders += [other, main]

    loaders = report.report_of(session).loaders

    assert [each.batches for each in loaders] == [500, 10]
    assert Bottleneck.LITTLE.said_by(loaders[1].bottleneck)
    assert loaders[1].advice[0].kind == Advice.LEAVE_IT.kind


REPORT = LoaderReport(
    name="train.py:41", contents="Images[1200], batches of 32, shuffled", epochs=5, batches=190, samples_per_s=212.3,
    wait_share=0.12, settings={"num_workers": 0, "pin_memory": False},
    settings_now={"num_workers": 2, "pin_memory": False, "prefetch_factor": 4},
    speedup=Interval(value=1.83, low=1.75, high=1.92, count=40), bottleneck=Bottleneck.CPU(),
    advice=(Advice.LEAVE_IT(), Advice.SPEED_UP_STEP()),
)  # fmt: skip


def test_a_script_with_hundreds_of_loaders_can_be_read() -> None:
    text = str(ScriptReport(verb="watch", seconds=61.0, loaders=(REPORT,) * 100))
    assert len(text.splitlines()) < 120
    assert text.endswith("88 loaders more, each with less time; --json FILE has all of them.")


def test_a_report_says_what_was_changed_and_what_it_brought() -> None:
    kept = LoaderReport(
        name="train.py:47", contents="Images[200], batches of 32", epochs=1, batches=7, samples_per_s=None, wait_share=None,
        settings={"num_workers": 0}, settings_now={"num_workers": 0}, kept=Kept.ITERABLE(),
        bottleneck=Bottleneck.UNCLEAR(),
    )  # fmt: skip
    found = ScriptReport(
        verb="run", seconds=61.0,
        loaders=(REPORT, kept), notes=("Written to loader.json.",),
    )  # fmt: skip
    assert str(found) == (
        "autotune-loader run: 2 loaders in 61 s\n"
        "\n"
        "train.py:41  Images[1200], batches of 32, shuffled\n"
        "  190 batches in 5 epochs, 212 samples/s, the loop waits 12 % of its time\n"
        "  settings: num_workers=0\n"
        "  now: num_workers=2, prefetch_factor=4: 1.83x (1.75x to 1.92x) as fast\n"
        "  Bottleneck: CPU.\n"
        "  next: Leave the loader as it is.\n"
        "\n"
        "train.py:47  Images[200], batches of 32\n"
        "  7 batches\n"
        "  settings: num_workers=0\n"
        f"  not changed: {Kept.ITERABLE()}\n"
        "  Bottleneck: unclear.\n"
        "\n"
        "Written to loader.json."
    )


@pytest.mark.parametrize(
    ("command", "typed", "told"),
    [
        (run_command, "-o /nope/x.json train.py", "--output='/nope/x.json' cannot be written.* would work"),
        (watch_command, "--json /nope/x.json train.py", "--json='/nope/x.json' cannot be written.*--json='report.json'"),
        (run_command, "--max-workers -1 train.py", "-1 is not in the range x>=0"),
        (run_command, "--start-with /nope/x.json train.py", "/nope/x.json"),
        (watch_command, "--fail-if-wait ten train.py", "'ten' is no share; 5% would work"),
        (run_command, "--fail-if-wait 110% train.py", "'110%' is no share"),
        (watch_command, "--workers train.py", "No such option"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_the_script_runs(command: click.Command, typed: str, told: str) -> None:
    with pytest.raises((ValueError, TunerError, click.UsageError), match=told):
        command.main(typed.split(), standalone_mode=False)


def test_the_environment_hands_the_plan_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_LOADER_SCRIPT", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert Plan.handed_on() is None

    plan = Plan(verb="run", script="train.py", workers=True, max_workers=3, most_waiting=0.1)
    for _ in range(2):
        plan.hand_on()

    assert Plan.handed_on() == plan
    ours, *theirs = os.environ["PYTHONPATH"].split(os.pathsep)
    assert re.search(r"autotune_loader/watch/startup$", ours)
    assert theirs == ["/theirs"]
