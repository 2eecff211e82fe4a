"""What a person sees while the tuner works: one line for each trial and each A/B round, on stderr or in the log."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from autotune_loader.values import LoaderConfig, Trial
from autotune_loader.values.units import number_text, rate_text

log = logging.getLogger(__name__)
CONFIG_WIDTH = 36
"""Columns that nearly every configuration fits into."""


def make_progress(shown: bool | None = None, *, rank: int = 0, stream: TextIO | None = None) -> Progress:
    """The progress for this process; ranks other than 0 only log.

    Args:
        shown: whether to print; None prints on a terminal and in a notebook.
        rank: of this process.
        stream: where to; stderr if None.
    """
    stream = sys.stderr if stream is None else stream
    if rank:
        return Progress(level=logging.DEBUG)
    is_seen = (_is_terminal(stream) or _is_notebook()) if shown is None else shown
    return Progress(stream if is_seen else None)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # a stream of the script's that has only write() and flush(); a closed one
        return False


def _is_notebook() -> bool:
    """Whether a notebook's kernel runs this process, and not IPython in a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)  # Colab's is a subclass


class Progress:
    """One line for each event, to a stream or, without one, to the log."""

    def __init__(self, stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
        self._stream, self._level = stream, level
        self.unit = "samples/s"
        """Of all rates."""

    def announce(self, text: str) -> None:
        """Print a line, such as what was inferred of the workload."""
        if self._stream is None:
            log.log(self._level, "%s", text)
        else:
            print(text, file=self._stream, flush=True)

    def trial(self, trial: Trial, best: Trial | None, seconds_left: float) -> None:
        """A trial is over: number, configuration, rate or how it failed, best so far, time left."""
        rates = [each.samples_per_s for each in (trial, best) if each is not None and each.samples_per_s is not None]
        outcome = "" if trial.failure is None else f"failed: {trial.failure.kind.replace('_', ' ')}"
        if trial.measurement is not None:
            outcome = rate_text(trial.measurement.samples_per_s.value, self.unit)
        best_text = f"best {number_text(max(rates))}" if rates else "no trial has worked yet"
        self._line(f"trial {trial.number:3d}", trial.config, f"{outcome:<15}  {best_text}", seconds_left)

    def round(self, number: int, rates: Mapping[LoaderConfig, float], seconds_left: float) -> None:
        """A paired round is over: its fastest configuration, and how many ran; failed ones are not in `rates`."""
        if not rates:
            self.announce(f"round {number:3d}  no setting worked")
            return
        leader = max(rates, key=lambda config: rates[config])
        outcome = f"{rate_text(rates[leader], self.unit):<15}  fastest of {len(rates)}"
        self._line(f"round {number:3d}", leader, outcome, seconds_left)

    def _line(self, name: str, config: LoaderConfig, outcome: str, seconds_left: float) -> None:
        left = f"{max(0, round(seconds_left))} s"
        self.announce(f"{name}  {config!s:<{CONFIG_WIDTH}}  {outcome}  {left} left")
