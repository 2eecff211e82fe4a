"""Lines of progress, as printed, and who gets them."""

import logging
import sys
from types import SimpleNamespace

import pytest
from report.example import KILLED, ran

from autotune_loader.report.progress import make_progress
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval

NONE, FOUR = LoaderConfig(), LoaderConfig(num_workers=4, prefetch_factor=4)
FAILED = ran(LoaderConfig(num_workers=16), KILLED, 3)
LINES = """\
config [/red] [bold]
trial   0  0 workers                             389/s ± 2.0 %      best 389/s  55 s left
trial   1  4 workers, prefetch 4                 1,308/s ± 2.0 %    best 1,308/s  53 s left
trial   3  16 workers, prefetch 2                failed: oom killed  best 1,308/s  50 s left
round   1  4 workers, prefetch 4                 1,300/s   fastest of 2  20 s left
round   2  nothing worked
"""
FIRST = ran(NONE, Interval(value=389.0, low=381.2, high=396.8, count=20), 0)
SECOND = ran(FOUR, Interval(value=1308.0, low=1281.8, high=1334.2, count=20), 1)
TERMINAL = {"isatty": lambda: True}
Shell = type("TerminalInteractiveShell", (), {})
Kernel = type("ZMQInteractiveShell", (), {})
Colab = type("Shell", (Kernel,), {})


@pytest.mark.parametrize(
    ("asked", "stderr", "shell", "rank", "shown"),
    [
        (None, TERMINAL, Shell, 0, "printed"),
        (None, {}, Shell, 0, "logged"),
        (None, {}, Kernel, 0, "printed"),
        (None, {}, Colab, 0, "printed"),
        (False, TERMINAL, Kernel, 0, "logged"),
        (True, {}, Shell, 0, "printed"),
        (True, TERMINAL, Shell, 1, "nowhere"),
    ],
)
def test_who_gets_the_lines(asked, stderr, shell, rank, shown, monkeypatch, caplog):
    made, printed = shell(), []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: made))
    monkeypatch.setenv("TERM", "xterm")
    # All that a script may put in stderr's place.
    stream = SimpleNamespace(write=printed.append, flush=lambda: None, **stderr)
    with caplog.at_level(logging.INFO, logger="autotune_loader"):
        progress = make_progress(asked, rank=rank, stream=stream)
        progress.announce("config [/red] [bold]")  # square brackets are text
        progress.trial(FIRST, FIRST, 55.0)
        progress.trial(SECOND, SECOND, 53.4)
        progress.trial(FAILED, SECOND, 50.0)
        progress.round(1, {FOUR: 1300.0, NONE: 390.0}, 20.0)
        progress.round(2, {}, 20.0)
    assert "".join(printed) == (LINES if shown == "printed" else "")
    assert [record.message for record in caplog.records] == (LINES.splitlines() if shown == "logged" else [])
