from __future__ import annotations

import io
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from report.example import BASELINE, BEST, KILLED, synthetic_result

from autotune_loader.report.progress import LiveProgress, PlainProgress, Progress, make_progress
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
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
    measurement = Measurement(
        samples_per_s=Interval(value=rate, low=rate * 0.98, high=rate * 1.02, count=20),
        samples=640,
        window_s=0.5,
        batch_size=32,
        first_batch_s=0.25,
        wait_share=0.1,
        service_s=0.08,
        service_cpu_s=0.07,
        receive_s=0.001,
        step_s=0.02,
    )
    return Trial(number=number, config=config, role="search", measurement=measurement)


FAILED = Trial(number=3, config=LoaderConfig(num_workers=16), role="search", failure=KILLED)


def play(progress: Progress) -> None:
    first, second = measured(0, BASELINE, 389.0), measured(1, BEST, 1308.0)
    with progress:
        progress.announce("Loss inferred: cross_entropy")
        progress.trial(first, first, 55.0)
        progress.trial(second, second, 53.4)
        progress.trial(FAILED, second, 50.0)
        progress.finals_round(1, {BEST: 1300.0, BASELINE: 390.0}, 20.0)


LINES = """\
Loss inferred: cross_entropy
trial   0  0 workers                                           389/s ± 2.0 %         best 389/s      55 s left
trial   1  4 workers, prefetch 4, 1 step thread                1,308/s ± 2.0 %       best 1,308/s    53 s left
trial   3  16 workers, prefetch 2                              failed: oom_killed    best 1,308/s    50 s left
round   1  4 workers, prefetch 4, 1 step thread                1,300/s, fastest of 2; slowest 390/s  20 s left
"""


def test_plain_progress_is_one_line_per_event() -> None:
    stream = io.StringIO()
    play(PlainProgress(stream))
    assert stream.getvalue() == LINES


def test_live_progress_prints_the_same_lines_and_redraws_the_best_so_far() -> None:
    # GIVEN a terminal
    terminal = Terminal()
    # WHEN it is drawn on
    play(make_progress("auto", stream=terminal))
    # THEN every line is there, and the line below them was drawn and removed
    written = terminal.getvalue()
    assert all(line in written for line in LINES.splitlines())
    assert "best so far 1,308/s with 4 workers, prefetch 4, 1 step thread, 53 s left" in written
    assert "paired rounds: 1 so far, 20 s left" in written
    assert "\x1b[2K" in written


def test_live_progress_starts_no_thread_and_leaves_the_streams_alone() -> None:
    # GIVEN what there was before
    threads, streams = threading.active_count(), (sys.stdout, sys.stderr)
    # WHEN a live line is open
    progress = LiveProgress(Terminal())
    progress.trial(FAILED, None, 10.0)
    # THEN nothing runs beside the tuner, and prints go where they went
    assert threading.active_count() == threads
    assert (sys.stdout, sys.stderr) == streams
    progress.close()


def test_closing_twice_is_harmless() -> None:
    terminal = Terminal()
    progress = LiveProgress(terminal)
    progress.announce("hello")
    progress.close()
    written = terminal.getvalue()
    progress.close()
    assert terminal.getvalue() == written


def test_square_brackets_are_text() -> None:
    terminal = Terminal()
    with LiveProgress(terminal) as progress:
        progress.announce("config [/red] [bold]")
    assert "config [/red] [bold]" in terminal.getvalue()


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_batch_job_is_silent_but_logs(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    # GIVEN a stream that nobody looks at
    stream = io.StringIO()
    # WHEN a library call reports to it
    with caplog.at_level(logging.INFO, logger="autotune_loader"):
        play(make_progress(mode, stream=stream))
    # THEN nothing is printed and every event is a record
    assert stream.getvalue() == ""
    assert [record.message for record in caplog.records] == LINES.splitlines()


def test_on_prints_plain_lines_where_stderr_is_no_terminal() -> None:
    stream = io.StringIO()
    play(make_progress("on", stream=stream))
    assert stream.getvalue() == LINES


def test_a_notebook_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a Jupyter kernel, whose stderr is no terminal
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    # THEN its lines are printed
    assert type(make_progress("auto", stream=io.StringIO())) is PlainProgress


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_ranks_other_than_zero_are_silent(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    terminal = Terminal()
    with caplog.at_level(logging.INFO, logger="autotune_loader"):
        play(make_progress(mode, stream=terminal))
    assert terminal.getvalue() == ""
    assert caplog.records == []


def test_a_mistyped_mode_is_answered_with_one_that_works() -> None:
    with pytest.raises(ValueError, match=r"progress='of' .* progress='off' would work"):
        make_progress("of")


def test_every_trial_of_a_real_run_fits_one_line() -> None:
    stream = io.StringIO()
    result = synthetic_result()
    with PlainProgress(stream) as progress:
        for trial in result.trials:
            progress.trial(trial, result.trials[0], 12.0)
    assert len(stream.getvalue().splitlines()) == len(result.trials)
