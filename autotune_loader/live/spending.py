"""What trying has cost a training run and what it has gained, in seconds of training; pauses are none."""

from __future__ import annotations

from autotune_loader.live.blocks import latest
from autotune_loader.live.traces import LiveTraces

MOST_LOST_SHARE = 0.01
"""Of the time trained, what trying may cost in all ..."""
CREDIT_S = 2.0
"""... and so much more at once, as nothing can be found out for nothing."""


class Spending:
    """The account of one loader.

    Args:
        traces: its batches.
    """

    def __init__(self, traces: LiveTraces) -> None:
        self._traces, self._accounted = traces, traces.end
        self.trained_s = self.gained_s = 0.0
        self.base: float | None = None
        """Samples/s of what ran before anything was tried; None while it is not known."""

    @property
    def affordable_s(self) -> float:
        """Seconds that trying may cost now."""
        return CREDIT_S + MOST_LOST_SHARE * self.trained_s + self.gained_s

    def account(self, *, is_trying: bool = True) -> None:
        """Time trained since the last look, and what trying has gained or lost in it; later that may be the machine's doing."""
        end = self._traces.end
        new, traces = end - self._accounted, latest(self._traces, self._accounted)
        self._accounted = end
        if not traces:
            return
        scale = new / len(traces)
        seconds = scale * (traces[-1].step_end - traces[0].requested)
        self.trained_s += seconds
        if is_trying and self.base is not None:
            self.gained_s += scale * sum(trace.samples for trace in traces) / self.base - seconds
