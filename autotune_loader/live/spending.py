"""What trying has cost a training run and what it has gained, in seconds of training; pauses are none."""

from __future__ import annotations

from autotune_loader.live.block_source import MOST_LOOKED_AT
from autotune_loader.live.traces import LiveTraces, continuous

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

    @property
    def affordable_s(self) -> float:
        """Seconds that trying may cost now."""
        return CREDIT_S + MOST_LOST_SHARE * self.trained_s + self.gained_s

    def account(self, base: float | None, best: float | None) -> None:
        """Time trained since the last look, and what it gained over the configuration at the start.

        Args:
            base: samples/s of that configuration; None while it is not known.
            best: of what it has settled on; None while it tries. What the machine does meanwhile is no fault of the trials.
        """
        end = self._traces.end
        new = end - self._accounted
        traces = continuous(self._traces.block(max(self._accounted, end - MOST_LOOKED_AT)), self._traces.changes)
        self._accounted = end
        if not traces:
            return
        scale = new / len(traces)
        seconds = scale * (traces[-1].step_end - traces[0].requested)
        self.trained_s += seconds
        if base is None:
            return
        if best is not None:
            self.gained_s += max(0.0, 1.0 - base / best) * seconds
        else:
            self.gained_s += scale * sum(trace.samples for trace in traces) / base - seconds
