"""Seconds of a loader's loops: where each of them went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from autotune_loader.pipeline.loop_log import Totals
    from autotune_loader.pipeline.waits import Waits

RARE = 0.2
"""Where more than this share of the batches takes long, that is what batches of this loader take."""


class Fetching(NamedTuple):
    """What making a batch takes, on average, in seconds; None is "not measured"."""

    seconds: float | None = None  # from its first sample until it is whole, waiting for a core included
    cpu_s: float = 0.0
    queued_s: float = 0.0  # of that, waiting for a core
    receive_queued_s: float = 0.0  # what the loop waits for a core while it receives a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds of the loops over a loader, from `iter()` to the end of the epoch, which add up to their wall time."""

    step: float = 0.0
    """Training steps: from a batch until the next one is asked for, without what follows."""
    evaluation: float = 0.0
    """Loops over other loaders within a step."""
    checkpoints: float = 0.0
    """Writing checkpoints within a step."""
    other: float = 0.0
    """Pauses: steps that are far longer than usual, and rare."""
    starting_workers: float = 0.0
    """Waiting for `iter()`, which starts the workers, and for the end of an epoch, which ends them."""
    first_batches: float = 0.0
    """Waiting for the first batch of an epoch, beyond what others take, and until all workers are ready."""
    computing: float = 0.0
    """Waiting for a batch whose worker, or the loop, computes."""
    core: float = 0.0
    """Waiting for a batch whose worker, or the loop, is ready to run and has no core."""
    unknown: float = 0.0
    """Waiting for a batch, where no clock told what its worker did."""
    storage: float = 0.0
    """Waiting for a batch whose worker, or the loop, does neither: it waits for storage, the network or a lock."""
    transfer: float = 0.0
    """Waiting for a batch that is whole, on its way to the loop."""
    pinning: float = 0.0
    """Waiting for a batch that is being pinned."""
    slow_samples: float = 0.0
    """Waiting for batches that take their worker far longer than usual, beyond what is usual."""
    slow_rank: float = 0.0
    """Waiting, within steps, for a rank that waits for data longer than this one."""

    @property
    def waiting(self) -> float:
        """All waiting for data."""
        return self.wall - self.step - self.evaluation - self.checkpoints - self.other

    @property
    def wall(self) -> float:
        """All of it."""
        parts: list[float] = [getattr(self, each.name) for each in fields(self)]
        return sum(parts)

    @property
    def accelerator_utilization(self) -> float | None:
        """AU of MLPerf Storage: the share of steps in steps and waiting (mlcommons/storage, Submission_guidelines.md)."""
        return self.step / (self.step + self.waiting) if self.step else None

    def beside(self, others: Iterable[Account]) -> Account:
        """The same where all steps wait for the rank that waits longest for data; `others` are the accounts of all ranks."""
        longer_s = max(each.waiting for each in others) - self.waiting
        return replace(self, step=self.step - longer_s, slow_rank=longer_s) if 0 < longer_s < self.step else self

    def to_plain(self) -> dict[str, Any]:
        """Its entry in a report: the wall time, and its parts."""
        return {"wall": self.wall, **asdict(self)}


def account_of(totals: Totals, waits: Waits, fetching: Fetching, *, has_workers: bool) -> Account:
    """The account of the loops that have these totals.

    Waiting for an epoch's first batch longer than for others is told apart; the rest is divided as in the batches whose history
    is known, and what workers take to make a batch as their clocks tell.
    """
    waits.settle()
    others = totals.batches - totals.epochs
    usual_s = (totals.waited_s - totals.started_s - totals.ended_s) / others if others > 0 else 0.0
    made_s, ended_s = (totals.made_s, totals.ended_s) if has_workers else (0.0, 0.0)
    first_s = max(0.0, totals.started_s - made_s - totals.epochs * usual_s)
    rest_s = max(0.0, totals.waited_s - made_s - ended_s - first_s)
    scale = rest_s / waits.waited_s if waits.waited_s else 0.0
    slow_s = scale * waits.slow_s if waits.slow <= RARE * waits.batches else 0.0
    pinning_s, transfer_s, unready_s = scale * waits.pinning_s, scale * waits.transfer_s, scale * waits.unready_s
    fetching_s = max(0.0, rest_s - slow_s - pinning_s - transfer_s - unready_s)
    own_queued_s = min(transfer_s, fetching.receive_queued_s * totals.batches)
    whole_s = max(fetching.seconds or 0.0, fetching.cpu_s + fetching.queued_s, 1e-12)
    computing_s, core_s = fetching_s * fetching.cpu_s / whole_s, fetching_s * fetching.queued_s / whole_s
    return Account(
        step=totals.stepped_s,
        evaluation=totals.evaluated_s,
        checkpoints=totals.saved_s,
        other=totals.paused_s,
        starting_workers=made_s + ended_s,
        first_batches=first_s + unready_s,
        computing=computing_s,
        core=core_s + own_queued_s,
        storage=fetching_s - computing_s - core_s if fetching.seconds is not None else 0.0,
        unknown=fetching_s if fetching.seconds is None else 0.0,
        transfer=transfer_s - own_queued_s,
        pinning=pinning_s,
        slow_samples=slow_s,
    )
