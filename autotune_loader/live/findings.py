"""What a loader has found out so far, for people and for the next job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from autotune_loader.live.tuning import LiveTuning
from autotune_loader.results.loader_file import Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig

if TYPE_CHECKING:
    import pandas as pd


class Findings:
    """The part of an AutoLoader that tells."""

    _tuning: LiveTuning | None
    config: Any

    @property
    def best(self) -> LoaderConfig:
        """The best configuration that is known; while something is tried, that may be another one than `config`."""
        return self.config if self._tuning is None else self._tuning.tuner.best

    @property
    def history(self) -> pd.DataFrame:
        """What was observed and decided, one row each: seconds trained, batch, configuration, samples/s, share of waiting."""
        from autotune_loader.live.result import history_frame

        return history_frame([] if self._tuning is None else self._tuning.tuner.history)

    @property
    def verdict(self) -> Verdict:
        """What binds training now."""
        return self._result().verdict

    def report(self) -> str:
        """What was tried, what was found and what binds, as text."""
        return self._result().report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json` with the best configuration known: the next job begins where this one ended."""
        self._result().save(path)

    def _result(self) -> TuningResult:
        return self._known().result(config=self.best, loader=self)

    def _known(self) -> LiveTuning:
        raise NotImplementedError
