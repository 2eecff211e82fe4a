"""What a script's report says, by table: verdicts, names, figures, options; without a script."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.cli.scripts import run_command
from autotune_loader.scripts import ranks
from autotune_loader.scripts.batch_log import BatchLog, Loop
from autotune_loader.scripts.nothing import tell_nothing
from autotune_loader.scripts.plan import Plan
from autotune_loader.scripts.report import ScriptReport
from autotune_loader.scripts.verdict import LEAVE_IT, LoaderReport, told
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

KNOWN = LoaderReport(batches=500, wait_share=0.4)
TWO = {"settings_now": LoaderConfig(num_workers=2).to_kwargs()}


def bound(binding: str, **more: Any) -> dict[str, Any]:
    return {"binding": binding, "evidence": "It binds.", **more}


def better(value: float, **more: Any) -> dict[str, Any]:
    rate = Interval(value=value, low=0.9 * value, high=1.1 * value, count=9)
    return {"expected_settings": TWO["settings_now"], "expected_speedup": rate, **bound("storage", **more)}


@pytest.mark.parametrize(
    ("facts", "verdict", "next_step"),
    [
        ({"batches": 1, "wait_share": None}, "1 batch: too few to say anything.", None),
        ({"wait_share": 0.004}, "The training step binds: the loop waits for data 0.4 %", LEAVE_IT),
        ({"wait_share": 0.004, "is_tuned": True}, "The training step binds", LEAVE_IT),  # and no "train for longer"
        ({"wait_share": 0.08}, "The training step binds: the loop waits for data 8 %", "no settings could bring more than 9 %"),
        ({"wait_share": 0.15, "script_share": 0.002}, "This loader hardly counts", LEAVE_IT),
        ({"starting_share": 0.3, **TWO}, "starts of epochs bind: they take 30 %", "up to 1.43x as fast"),
        ({}, "The loader binds: the loop waits for data 40 % of the time; the latest batches do not show why", None),
        (bound("unclear"), "The loader binds: .* do not show why", None),
        (bound("cpu", advice="do this"), "^It binds", "do this"),
        (bound("cpu", latest_wait_share=0.1), "^Lately: It binds", None),
        (bound("step", latest_wait_share=0.39, advice="do this"), "^Lately: It binds", "do this"),
        (bound("start_up", starting_share=0.12, **TWO), "starts of epochs bind: they take 12 %", "persistent_workers=True"),
        ({"epochs": 100, "wait_share": None}, "No step could be timed: each epoch was left", "batches = iter"),
        (better(1.5) | bound("in_memory"), "It binds", LEAVE_IT),
        (better(1.5), "It binds", r"=2, .*: 1.50x \(1.35x to 1.65x\) as fast is"),
        (better(43.0), "It binds", "more than 10 times as fast is expected"),
        (better(1.02, advice="do this"), "It binds", "do this"),
        (better(1.5, why_watched="it streams"), "It binds", "to try, as it streams"),
        (bound("storage", is_tuned=True), "It binds", "train for longer"),
        (bound("storage", is_tuned=True, is_settled=True, advice="do this"), "It binds", "do this"),
        (bound("storage", is_tuned=True, mend="open it in __getitem__"), "It binds", "open it in __getitem__"),
    ],
)  # fmt: skip
def test_one_verdict_and_the_step_that_follows_from_it(
    facts: dict[str, Any], verdict: str, next_step: str | None
) -> None:
    found = told(replace(KNOWN, **facts))

    assert re.search(verdict, found.verdict)
    assert (found.next_step is None) == (next_step is None)
    assert re.search(next_step or "", found.next_step or "")


@pytest.mark.parametrize(
    ("shares", "count", "sentence"),
    [
        ([0.3, None, None, None], 4, None),
        ([0.3, 0.32], 2, "All ranks wait for data alike: 30 % to 32 % of their time."),
        ([0.05, 0.42, 0.07], 3, "Rank 1 waits most for data: 42 % of its time, the others 6 %. Its loader costs"),
        ([0.05, 0.42, None, 0.9], 4, "Of 4 ranks, 2 are known here."),  # the last one is on another machine
    ],
)  # fmt: skip
def test_the_rank_that_waits_most_is_named_by_rank_0_which_removes_what_the_others_left(
    shares: list[float | None], count: int, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank, share in enumerate(shares):
        ranks.leave(str(tmp_path / str(rank // 3)), rank, count, share)

    said = ranks.sentence(ranks.gather(str(tmp_path / "0"), count), count)

    assert said is None if sentence is None else sentence in (said or "")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def logged(waits: list[float], steps: list[float], *, blocked_s: float = 0.0, epochs: int = 1) -> BatchLog:
    log, now = BatchLog(), 0.0
    loop = Loop(log, DataLoader(TensorDataset(torch.arange(8 * len(waits))), batch_size=8))
    for _ in range(epochs):
        loop.blocked(blocked_s)
        for wait_s, step_s in zip(waits, steps, strict=True):
            loop.ask(now)
            loop.receive(now + wait_s, torch.zeros(1))
            now += wait_s + step_s
        loop.ask(now)
        loop.end(now)
    return log


def test_waiting_pauses_and_starts_of_epochs_are_told_apart() -> None:
    log = logged([0.3] * 4, [0.1, 0.1, 60.0, 0.1], blocked_s=0.5)  # an evaluation of a minute is no step

    assert (log.batches, log.samples, log.epochs, log.running) == (4, 32, 1, 0)
    assert log.waited_s == pytest.approx(0.5 + 4 * 0.3)
    assert log.stepped_s == pytest.approx(3 * 0.1)
    assert BatchLog().starting_share == 0.0
    log = logged([1.1, 0.1, 0.1, 0.1], [0.1] * 4, blocked_s=1.0, epochs=2)
    assert log.wait_share == pytest.approx(4.8 / 5.6)
    assert log.starting_share == pytest.approx((2 * 2.1 - 2 * 0.1) / 5.6)


REPORT = LoaderReport(
    name="train.py:41", contents="Images[1200], batches of 32, shuffled", epochs=5, batches=190, samples_per_s=212.3,
    wait_share=0.12, gpu_share=0.8, settings={"num_workers": 0, "pin_memory": False},
    settings_now={"num_workers": 2, "pin_memory": False, "prefetch_factor": 4},
    speedup=Interval(value=1.83, low=1.75, high=1.92, count=40), verdict="The CPU binds.", next_step="use more cores",
)  # fmt: skip


def test_a_block_says_what_was_changed_and_what_it_brought() -> None:
    report = ScriptReport(
        verb="run", seconds=61.0, peak_memory_bytes=300 << 20, peak_child_memory_bytes=200 << 20,
        peak_gpu_memory_bytes=None, loaders=(REPORT,), notes=("Written to loader.json.",),
    )  # fmt: skip
    assert str(report) == (
        "autotune-loader run: 1 loader in 61 s; peak memory 300 MiB, largest child process 200 MiB\n"
        "\n"
        "train.py:41  Images[1200], batches of 32, shuffled\n"
        "  190 batches in 5 epochs, 212 samples/s, the loop waits 12 % of its time, the GPU works 80 % of it\n"
        "  settings: num_workers=0\n"
        "  now: num_workers=2, prefetch_factor=4: 1.83x (1.75x to 1.92x) as fast\n"
        "  The CPU binds.\n"
        "  next: use more cores\n"
        "\n"
        "Written to loader.json."
    )


@pytest.mark.parametrize(
    ("command", "typed", "told"),
    [
        (run_command, "-o /nope/x.json train.py", "--output='/nope/x.json' cannot be written.* would work"),
        (run_command, "--report /nope/x.html train.py", "--report='/nope/x.html' cannot be written.*--report='report.html'"),
        (run_command, "--max-workers -1 train.py", "-1 is not in the range x>=0"),
        (run_command, "--fail-if-wait ten train.py", "'ten' is no share; 5% would work"),
        (run_command, "--fail-if-wait 110% train.py", "'110%' is no share"),
        (run_command, "--fail-if-wait -0.1 train.py", "'-0.1' is no share"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_the_script_runs(
    command: click.Command, typed: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told.startswith("WORLD_SIZE"):
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises((ValueError, click.BadParameter), match=told):
        command.main(typed.split(), standalone_mode=False)


def test_only_rank_0_says_that_there_is_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, count in (("", 1), ("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        tell_nothing(Plan(verb="watch"))
        assert capsys.readouterr().err.count("Nothing can be told") == count


def test_the_environment_hands_the_plan_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_LOADER_SCRIPT", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert Plan.handed_on() is None

    Plan(verb="tune", max_workers=3).hand_on()

    assert Plan.handed_on() == Plan(verb="run", max_workers=3)  # only the script itself is ended
    assert os.environ["PYTHONPATH"].split(":")[1] == "/theirs"
