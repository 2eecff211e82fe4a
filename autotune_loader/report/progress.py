"""What a person sees while the tuner works: one line per trial on stderr, and on a terminal the best so far below them.

    plain      a line per trial; in a notebook and wherever stderr is no terminal
    live       the same lines, and under them one that is redrawn: best so far, time left
    silent     log records at INFO; in a library call of a batch job, with progress="off", on ranks but 0 (DEBUG)

No thread redraws anything: the tuner may fork, and a lock that such a thread holds would be held in the child forever.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO, get_args

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.report.units import rate_text, relative_error_text, seconds_text
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trial import Trial
from autotune_loader.values.validation import require_choice

log = logging.getLogger(__name__)

ProgressMode = Literal["auto", "on", "off"]
PROGRESS_MODES: tuple[ProgressMode, ...] = get_args(ProgressMode)
"""For those who check an option, or offer it."""
_CONFIG_WIDTH = 50
"""Columns of a configuration in a line: what nearly all of them fit into."""


class Progress:
    """Told what the tuner does, and says nothing: every event becomes a log record. The others print instead.

    A context manager; `close()` may be called more than once and leaves the terminal as it was.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level

    def announce_machine(self, usable_cores: int, gpu_reason: str | None) -> None:
        """That the probe starts; and why there will be no figures of a GPU, where there will be none."""
        notice = "" if gpu_reason is None else f"; no GPU is watched ({gpu_reason})"
        self.announce(f"starting the probe on {usable_cores} usable cores{notice}")

    def announce(self, text: str) -> None:
        """Something worth a line of its own, such as what was inferred of the workload."""
        self._say(text)

    def trial(self, trial: Trial, best: Trial | None, seconds_left: float) -> None:
        """A trial is over."""
        self._say(trial_line(trial, best, seconds_left))
        config, rate = (best.config, best.samples_per_s) if best else (None, None)
        self._redraw(standing_line(config, rate, seconds_left))

    def finals_round(self, number: int, rates: Mapping[LoaderConfig, float], seconds_left: float) -> None:
        """A round of the finals is over; failed configurations are not in `rates`."""
        self._say(round_line(number, rates, seconds_left))
        self._redraw(f"paired rounds: {number} so far, {_left(seconds_left)}")

    def close(self) -> None:
        """Nothing follows."""

    def _say(self, line: str) -> None:
        log.log(self._level, "%s", line)

    def _redraw(self, line: str) -> None:
        """Show `line` in place of the last one, where there is such a place."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PlainProgress(Progress):
    """Prints lines, nothing else: for logs, pipes and notebooks."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveProgress(Progress):
    """Prints lines above one that is redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True)
        # The user's own prints go where they went before: stdout may be read by a program.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def _say(self, line: str) -> None:
        self._live.start()  # does nothing when it has started, as stop() does when it has stopped
        self._live.console.print(line)

    def _redraw(self, line: str) -> None:
        from rich.text import Text

        self._live.start()
        self._live.update(Text(line, style="bold", no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        self._live.stop()


def make_progress(mode: ProgressMode, *, stream: TextIO | None = None) -> Progress:
    """The progress for this process.

    Args:
        mode: `"on"` prints, `"off"` does not, `"auto"` prints where someone looks: on a terminal and in a notebook.
        stream: where to; stderr if None.

    Raises:
        ValueError: `mode` is none of the three.
    """
    require_choice("progress", mode, PROGRESS_MODES)
    stream = sys.stderr if stream is None else stream
    if rank_of_environment()[0]:
        return Progress(logging.DEBUG)
    is_terminal, is_notebook = _is_terminal(stream), _is_notebook()
    if mode == "off" or stream is None or (mode == "auto" and not (is_terminal or is_notebook)):
        return Progress()
    return LiveProgress(stream) if is_terminal and not is_notebook else PlainProgress(stream)


def trial_line(trial: Trial, best: Trial | None, seconds_left: float) -> str:
    """One trial in one line: number, configuration, rate with its error or how it failed, best so far, time left."""
    best_text = f"best {rate_text(best.samples_per_s)}" if best else "nothing has worked yet"
    start = f"trial {trial.number:3d}  {trial.config!s:<{_CONFIG_WIDTH}}  {_outcome(trial):<20}"
    return f"{start}  {best_text:<14}  {_left(seconds_left)}"


def round_line(number: int, rates: Mapping[LoaderConfig, float], seconds_left: float) -> str:
    """One round of the finals in one line: who led it, and how far apart the others were."""
    if not rates:
        return f"round {number:3d}  nothing worked  {_left(seconds_left)}"
    leader = max(rates, key=lambda config: rates[config])
    others = ""
    if len(rates) > 1:
        others = f", fastest of {len(rates)}; slowest {rate_text(min(rates.values()))}"
    return f"round {number:3d}  {leader!s:<{_CONFIG_WIDTH}}  {rate_text(rates[leader])}{others}  {_left(seconds_left)}"


def standing_line(config: LoaderConfig | None, samples_per_s: float | None, seconds_left: float) -> str:
    """The line that is redrawn: best so far and time left."""
    best = f"best so far {rate_text(samples_per_s)} with {config}" if config else "nothing has worked yet"
    return f"{best}, {_left(seconds_left)}"


def _outcome(trial: Trial) -> str:
    if trial.failure is not None:
        return f"failed: {trial.failure.kind}"
    assert trial.measurement is not None
    rate = trial.measurement.samples_per_s
    return f"{rate_text(rate.value)} {relative_error_text(rate)}".rstrip()


def _left(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole} s left" if whole < 120 else f"{seconds_text(whole)} left"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; IPython in a terminal is none."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
