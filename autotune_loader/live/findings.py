"""What a loader has found out so far, for people and for the next job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from autotune_loader.live.result import LoaderFacts, not_tried
from autotune_loader.live.state import LoaderState
from autotune_loader.live.traces import continuous
from autotune_loader.live.tuning import LiveTuning
from autotune_loader.results.loader_file import Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Findings:
    """The part of an AutoLoader that tells, people and other loaders."""

    _state: LoaderState
    _tuning: LiveTuning | None
    config: Any
    on_change: Any
    traces: Any

    @property
    def best(self) -> LoaderConfig:
        """The best configuration that is known; while something is tried, that may be another one than `config`."""
        return self.config if self._tuning is None else self._tuning.tuner.best

    @property
    def history(self) -> pd.DataFrame:
        """What was observed and decided, one row each: seconds trained, batch, configuration, samples/s, share of waiting."""
        from autotune_loader.live.result import history_frame

        return history_frame([] if self._tuning is None else self._tuning.tuner.history)

    def plot(self) -> Figure:
        """A picture of the training that is remembered: samples/s over time, and where the configuration changed."""
        from autotune_loader.report.plots.training import plot_training

        log = self.traces
        batches = log.block(log.first)
        starts = [(each.serves_from - log.first, each.config) for each in log.changes]
        return plot_training(continuous(batches, log.changes), starts)

    @property
    def verdict(self) -> Verdict:
        """What binds training now."""
        return self._result().verdict

    def report(self) -> str:
        """What was tried, what was found and what binds, as text; and why nothing was tried, where that is so."""
        text, refusal = self._result().report(), self._state.refusal
        return text if refusal is None else f"{text}\n\n{not_tried(refusal)}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json` with the best configuration known: the next job begins where this one ended."""
        self._result().save(path)

    def go_on_from(self, state: LoaderState, tuning: LiveTuning) -> None:
        """Take over what another loader learnt that did the same work, as where a script makes a loader for each epoch.

        Args:
            state: of the other loader, which is not iterated any more.
            tuning: of the other loader.
        """
        self._state, self._tuning = state, tuning
        tuning.follow(self._change, self.on_change)

    @property
    def learnt(self) -> tuple[LoaderState, LiveTuning]:
        """What `go_on_from` takes over."""
        return self._state, self._known()

    def _result(self) -> TuningResult:
        return self._known().result(config=self.best, facts=LoaderFacts.of(self, self._state.stages))

    def _change(self, config: LoaderConfig) -> None:
        raise NotImplementedError

    def _known(self) -> LiveTuning:
        raise NotImplementedError
