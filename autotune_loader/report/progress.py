"""What a person sees while the tuner works: one line for each trial and each round, on stderr or in the log."""

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

log = logging.getLogger(__name__)

ProgressMode = Literal["auto", "on", "off"]
PROGRESS_MODES: tuple[ProgressMode, ...] = get_args(ProgressMode)
"""For those who check an option, or offer it."""
_CONFIG_WIDTH = 50
"""Columns of a configuration in a line: nearly all of them fit into these."""


class Progress:
    """One line for each event, to a stream or, without one, to the log."""

    def __init__(self, stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
        self._stream, self._level = stream, level

    def announce(self, text: str) -> None:
        """Print a line, such as what was inferred of the workload."""
        if self._stream is None:
            log.log(self._level, "%s", text)
        else:
            print(text, file=self._stream, flush=True)

    def trial(self, trial: Trial, best: Trial | None, seconds_left: float) -> None:
        """A trial is over: number, configuration, rate with its error or how it failed, best so far, time left."""
        rate = trial.measurement.samples_per_s if trial.measurement is not None else None
        outcome = f"failed: {trial.failure.kind}" if trial.failure is not None else ""
        outcome = outcome if rate is None else f"{rate_text(rate.value)} {relative_error_text(rate)}".rstrip()
        best_text = f"best {rate_text(best.samples_per_s)}" if best else "nothing has worked yet"
        start = f"trial {trial.number:3d}  {trial.config!s:<{_CONFIG_WIDTH}}  {outcome:<20}"
        self.announce(f"{start}  {best_text:<14}  {_left(seconds_left)}")

    def finals_round(self, number: int, rates: Mapping[LoaderConfig, float], seconds_left: float) -> None:
        """A paired round is over: its fastest configuration, and its slowest; failed ones are not in `rates`."""
        text = f"{'nothing worked':<{_CONFIG_WIDTH}}"
        if rates:
            leader = max(rates, key=lambda config: rates[config])
            slowest = f", fastest of {len(rates)}; slowest {rate_text(min(rates.values()))}" if len(rates) > 1 else ""
            text = f"{leader!s:<{_CONFIG_WIDTH}}  {rate_text(rates[leader])}{slowest}"
        self.announce(f"round {number:3d}  {text}  {_left(seconds_left)}")


def make_progress(mode: ProgressMode, *, stream: TextIO | None = None) -> Progress:
    """The progress for this process; ranks other than 0 only log.

    Args:
        mode: `"on"` prints, `"off"` only logs, `"auto"` prints on a terminal and in a notebook.
        stream: where to; stderr if None.
    """
    stream = sys.stderr if stream is None else stream
    if rank_of_environment()[0]:
        return Progress(level=logging.DEBUG)
    is_seen = mode == "on" or (mode == "auto" and (_is_terminal(stream) or _is_notebook()))
    return Progress(stream if is_seen else None)


def _left(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole} s left" if whole < 120 else f"{seconds_text(whole)} left"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # a script's own, with write() and flush() alone; closed
        return False


def _is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; IPython in a terminal is none."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
