"""A process tree watched from outside while a burst runs: an alarm before memory runs out, growth that lasts, NVML.

    RSS     x   x   x   x   x   x   x   x   x   x      every 0.25 s
    PSS                     x     x         x          at 1 s, 1.5 s, 2.25 s ...

PSS walks page tables and stalls the processes it reads, so it is taken as rarely as a slope allows. What a burst takes in its
window it tells itself (`machine.meters.window`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil

from autotune_loader.machine.gpus import Gpus, use_within
from autotune_loader.machine.processes import tree, tree_pss, tree_use
from autotune_loader.values.measurement import Measurement

logger = logging.getLogger(__name__)
PERIOD_S = 0.25
"""Between looks: 4 Hz, below the 5 Hz at which reading RSS begins to cost."""
MEMBERS_S = 1.0
"""Between looks for new processes of the tree, which read the parents of all processes there are."""
FIRST_PSS_S = 1.0
"""When PSS is first taken: late enough for workers to be up."""
PSS_SPACING = 1.5
"""Each further PSS is taken when the burst is this many times as old: a slope for a handful of reads."""
GUARDED_SHARE = 0.9
"""Of the budget: the rest is for what is allocated between two looks."""
SUSPICION_S = 1.0
"""Where RSS, which counts shared pages once for each process, raises suspicion, PSS decides, as often as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PssSample:
    """One reading of the tree's proportional set size."""

    at: float
    """In seconds."""
    pss_bytes: int
    processes: int
    """Processes in the tree at that moment."""


class TreeMeter:
    """Watches a process tree from entering to leaving a `with` block.

    Args:
        pid: process at the root of the tree.
        usable_cores: what CPU use is a share of.
        memory_budget_bytes: the tree may not outgrow 90 % of it; None for no alarm.
        memory_held_bytes: what the tree held before anything was run; it comes on top of the budget.
        on_memory_limit: called once, on the meter's thread, when it does; it should end the burst.
        gpus: where to ask about the GPU, the first of them; None leaves it unwatched.
    """

    def __init__(
        self,
        pid: int,
        *,
        usable_cores: float,
        memory_budget_bytes: int | None = None,
        memory_held_bytes: int = 0,
        on_memory_limit: Callable[[], None] = lambda: None,
        gpus: Gpus | None = None,
    ) -> None:
        self._pid = pid
        self._usable_cores = usable_cores
        self._limit_bytes = (
            None if memory_budget_bytes is None else memory_held_bytes + GUARDED_SHARE * memory_budget_bytes
        )
        self._on_memory_limit = on_memory_limit
        self._gpus = gpus
        self._gpu = next(iter(gpus.devices()), None) if gpus is not None else None
        self._gpu_samples: list[tuple[float, float]] = []
        self._pss: list[PssSample] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autotune-loader-meter", daemon=True)

    def __enter__(self) -> TreeMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; at once, but for a look under way."""
        self._stopped.set()
        self._thread.join()
        if self._gpus is not None and self._gpu is not None:
            now = time.monotonic()
            self._gpu_samples = [(now - ago, share) for ago, share in self._gpus.recent_use(self._gpu)]

    def added_to(self, measured: Measurement) -> Measurement:
        """The measurement with what only this meter saw; its traces are on the same clock."""
        memory, cpu, util = measured.memory, measured.cpu_share, None
        if measured.traces:
            end = measured.traces[-1].step_end
            util = use_within(self._gpu_samples, end - measured.window_s, end)
        return replace(
            measured,
            cpu_share=None if cpu is None else cpu / self._usable_cores,
            memory=None if memory is None else replace(memory, pss_slope_bytes_per_s=pss_slope(self._pss)),
            gpu=replace(measured.gpu, util=util, reason=self._why_no_figure() if util is None else None),
        )

    def _why_no_figure(self) -> str | None:
        if self._gpus is None:
            return "the step does not run on an NVIDIA GPU"
        if self._gpu is None:
            return self._gpus.reason or "NVML does not know the device"
        return "the burst is too short for NVML's utilisation"

    def _watch(self) -> None:
        begun, next_pss, quiet_until, next_members = time.monotonic(), FIRST_PSS_S, 0.0, 0.0
        members: list[psutil.Process] = []
        while not self._stopped.wait(PERIOD_S):
            try:
                now = time.monotonic()
                if now >= next_members:
                    members, next_members = tree(self._pid), now + MEMBERS_S
                use = tree_use(members)
                if use is None:
                    return
                is_due = now - begun >= next_pss
                is_suspicious = self._is_over(use.rss_bytes) and now >= quiet_until
                if not is_due and not is_suspicious:
                    continue
                pss_bytes = tree_pss(members)
                if is_due:
                    next_pss = PSS_SPACING * max(next_pss, now - begun)
                    if pss_bytes is not None:
                        self._pss.append(PssSample(at=now, pss_bytes=pss_bytes, processes=use.processes))
                if is_suspicious:
                    quiet_until = now + SUSPICION_S
                    self._guard(pss_bytes or use.rss_bytes)
            except Exception as error:
                logger.warning("A meter stopped: %s", error, exc_info=True)
                return

    def _is_over(self, used: int) -> bool:
        return self._limit_bytes is not None and used > self._limit_bytes

    def _guard(self, used: int) -> None:
        if self._is_over(used):
            logger.warning("Memory guard: %d bytes in use, %d allowed", used, self._limit_bytes)
            self._limit_bytes = None
            self._on_memory_limit()


def pss_slope(pss: Sequence[PssSample]) -> float | None:
    """Growth in bytes per second that lasts; None where the burst was too short to tell.

    Workers that have just started touch pages for the first time, which looks like a leak and soon ends. So growth counts
    only as far as it lasts: at the lowest rate between two readings in a row. Memory that stood still or
    shrank between any two of them does not grow.

    Workers that start or end between readings are no growth either, so only readings with the most processes count.
    """
    most = max((sample.processes for sample in pss), default=0)
    full = [sample for sample in pss if sample.processes == most]
    if len(full) < 3 or full[-1].at - full[0].at < 1.0:
        return None  # two readings cannot tell a leak from workers that still warm up
    rates = [(b.pss_bytes - a.pss_bytes) / (b.at - a.at) for a, b in pairwise(full)]
    overall = (full[-1].pss_bytes - full[0].pss_bytes) / (full[-1].at - full[0].at)
    return min(overall, max(0.0, min(rates)))
