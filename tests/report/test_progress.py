from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from report.example import BASELINE, BEST, KILLED, synthetic_result

from autotune_loader.report.progress import Progress, make_progress
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _one_ordinary_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def measured(number: int, config: LoaderConfig, rate: float) -> Trial:
    own = synthetic_result().trials[0].measurement
    assert own is not None
    seen = replace(own, samples_per_s=Interval(value=rate, low=rate * 0.98, high=rate * 1.02, count=20))
    return Trial(number=number, config=config, role="search", measurement=seen)


FAILED = Trial(number=3, config=LoaderConfig(num_workers=16), role="search", failure=KILLED)


def play(progress: Progress) -> None:
    first, second = measured(0, BASELINE, 389.0), measured(1, BEST, 1308.0)
    progress.announce("config [/red] [bold]")  # square brackets are text
    progress.trial(first, first, 55.0)
    progress.trial(second, second, 53.4)
    progress.trial(FAILED, second, 50.0)
    progress.finals_round(1, {BEST: 1300.0, BASELINE: 390.0}, 20.0)


LINES = """\
config [/red] [bold]
trial   0  0 workers                                           389/s ± 2.0 %         best 389/s      55 s left
trial   1  4 workers, prefetch 4, 1 step thread                1,308/s ± 2.0 %       best 1,308/s    53 s left
trial   3  16 workers, prefetch 2                              failed: oom_killed    best 1,308/s    50 s left
round   1  4 workers, prefetch 4, 1 step thread                1,300/s, fastest of 2; slowest 390/s  20 s left
"""


def test_a_terminal_gets_the_lines_and_nothing_else() -> None:
    terminal = Terminal()
    play(make_progress("auto", stream=terminal))
    assert terminal.getvalue() == LINES


@pytest.mark.parametrize(
    ("mode", "shell", "rank", "shown"),
    [
        ("auto", "Terminal", None, "logged"),
        ("off", "ZMQInteractiveShell", None, "logged"),
        ("on", "Terminal", None, "printed"),
        ("auto", "ZMQInteractiveShell", None, "printed"),  # as in a Jupyter kernel
        ("on", "Terminal", "1", "nowhere"),
    ],
)
def test_who_gets_the_lines_where_stderr_is_no_terminal(
    mode: str,
    shell: str,
    rank: str | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = type(shell, (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: made))
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    lines: list[str] = []
    stream: Any = SimpleNamespace(write=lines.append, flush=lambda: None)  # all that a script may put in stderr's place
    with caplog.at_level(logging.INFO, logger="autotune_loader"):
        play(make_progress(mode, stream=stream))
    assert "".join(lines) == (LINES if shown == "printed" else "")
    assert [record.message for record in caplog.records] == (LINES.splitlines() if shown == "logged" else [])


def test_a_mistyped_mode_is_answered_with_one_that_works() -> None:
    with pytest.raises(ValueError, match=r"progress='of' .* progress='off' would work"):
        make_progress("of")
