"""A process tree watched from outside while a burst runs: an alarm before memory runs out, and NVML once it is over.

What a burst takes in its window it tells itself (`machine.meters.window`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from autotune_loader.machine.gpus import Gpus, use_within
from autotune_loader.machine.processes import tree, tree_pss, tree_use
from autotune_loader.values.measurement import Measurement

logger = logging.getLogger(__name__)
PERIOD_S = 0.25
"""Between looks: 4 Hz, below the 5 Hz at which reading RSS begins to cost."""
MEMBERS_S = 1.0
"""Between looks for new processes of the tree, which read the parents of all processes there are."""
GUARDED_SHARE = 0.9
"""Of the budget: the rest is for what is allocated between two looks."""
SUSPICION_S = 1.0
"""Where RSS, which counts shared pages once for each process, raises suspicion, PSS decides, as often as this: reading it walks
page tables and stalls the processes."""


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
        self._pid, self._usable_cores, self._on_memory_limit = pid, usable_cores, on_memory_limit
        budget = memory_budget_bytes
        self._limit_bytes = None if budget is None else memory_held_bytes + GUARDED_SHARE * budget
        self._gpus = gpus
        self._gpu = next(iter(gpus.devices()), None) if gpus is not None else None
        self._gpu_samples: list[tuple[float, float]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="autotune-loader-meter", daemon=True)

    def __enter__(self) -> TreeMeter:
        if self._limit_bytes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; at once, but for a look under way."""
        self._stopped.set()
        if self._limit_bytes is not None:
            self._thread.join()
        if self._gpus is not None and self._gpu is not None:
            now = time.monotonic()
            self._gpu_samples = [(now - ago, share) for ago, share in self._gpus.recent_use(self._gpu)]

    def added_to(self, measured: Measurement) -> Measurement:
        """The measurement with what only this meter saw; its traces are on the same clock."""
        util, reason = None, self._why_no_figure()
        if measured.traces:
            end = measured.traces[-1].step_end
            util = use_within(self._gpu_samples, end - measured.window_s, end)
        cpu = None if measured.cpu_share is None else measured.cpu_share / self._usable_cores
        gpu = replace(measured.gpu, util=util, reason=reason if util is None else None)
        return replace(measured, cpu_share=cpu, gpu=gpu)

    def _why_no_figure(self) -> str:
        if self._gpus is None:
            return "the step does not run on an NVIDIA GPU"
        if self._gpu is None:
            return self._gpus.reason or "NVML does not know the device"
        return "the burst is too short for NVML's utilisation"

    def _guard(self) -> None:
        """Look until the tree is too large, or gone, or the burst is over."""
        next_members = next_pss = 0.0
        try:
            while not self._stopped.wait(PERIOD_S):
                now = time.monotonic()
                if now >= next_members:
                    members, next_members = tree(self._pid), now + MEMBERS_S
                use = tree_use(members)
                if use is None:
                    return
                if not self._is_over(use.rss_bytes) or now < next_pss:
                    continue
                next_pss = now + SUSPICION_S
                used = tree_pss(members) or use.rss_bytes
                if self._is_over(used):
                    logger.warning("Memory guard: %d bytes in use, %d allowed", used, self._limit_bytes)
                    self._on_memory_limit()
                    return
        except Exception as error:
            logger.warning("A meter stopped: %s", error, exc_info=True)

    def _is_over(self, used: int) -> bool:
        return self._limit_bytes is not None and used > self._limit_bytes
