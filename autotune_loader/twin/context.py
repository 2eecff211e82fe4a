"""What the twin needs besides bursts: the cores there are, and what the training step takes of them alone."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinContext:
    """The machine and the step, as measured without a loader; part of `loader.json`, so that a loaded result can predict."""

    usable_cores: int
    consumer_cores: float
    """Cores that the step keeps busy: its intra-op threads on a CPU, 1 where it only feeds an accelerator."""
    step_s: tuple[tuple[int | None, float], ...] = ()
    """Seconds of the step on a cached batch, by `consumer_threads`."""
    epoch_batches: int | None = None
    """Batches of an epoch; None where that is unknown."""

    @property
    def step_s_by_threads(self) -> dict[int | None, float]:
        return dict(self.step_s)

    def with_step(self, threads: int | None, step_s: float) -> TwinContext:
        """The same, with what the step was measured to take with these threads."""
        return replace(self, step_s=tuple({**dict(self.step_s), threads: step_s}.items()))
