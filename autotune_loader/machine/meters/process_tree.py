"""What a process tree takes while a burst runs: memory, shared memory, CPU, GPU; and an alarm before memory runs out.

    RSS, CPU, shm   x   x   x   x   x   x   x   x   x   x      every 0.25 s, about 0.1 ms each
    PSS                             x     x         x   x      at 1 s, 1.5 s, 2.25 s ..., and at the end

PSS walks page tables and stalls the processes it reads, so it is taken as rarely as a slope allows. `MemoryGuard` ends a burst
before the kernel's OOM killer chooses a process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autotune_loader.machine.gpus import GpuDevice, Gpus, GpuSample
from autotune_loader.machine.host import HostCpu, host_cpu
from autotune_loader.machine.limits import SharedMemory, affinity, shared_memory
from autotune_loader.machine.meters.cpu import cpu_shares
from autotune_loader.machine.meters.gpu import NO_GPU, gpu_use, use_within
from autotune_loader.machine.meters.sampler import Sampler
from autotune_loader.machine.processes import ProcessTree, TreeUse
from autotune_loader.values.measurement import GpuUse, Measurement, MemoryUse

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MemoryGuard:
    """Raises the alarm once when a process tree outgrows 90 % of its budget: the rest is for what is allocated meanwhile.

    RSS counts shared pages once per process, so it only raises suspicion; PSS decides, where there is one.
    """

    budget_bytes: int
    alarm: Callable[[], None]
    """Ends the burst; called once."""
    held_bytes: int = 0
    """What the tree held before anything was run; it comes on top of the budget."""
    is_raised: bool = field(default=False, init=False)
    _quiet_until: float = field(default=-math.inf, init=False)

    def check(self, now: float, rss_bytes: int, pss_bytes: Callable[[], int | None]) -> None:
        """Raise the alarm if it is time to; `pss_bytes` is only called on suspicion."""
        limit_bytes = self.held_bytes + 0.9 * self.budget_bytes
        if self.is_raised or rss_bytes <= limit_bytes or now < self._quiet_until:
            return
        used = pss_bytes()
        if (rss_bytes if used is None else used) > limit_bytes:
            self.is_raised = True
            logger.warning("Memory guard: %d bytes in use, %d allowed", used or rss_bytes, limit_bytes)
            self.alarm()
        self._quiet_until = now + 1.0  # PSS is read once a second at most


PERIOD_S = 0.25
"""Between looks: 4 Hz, below the 5 Hz at which reading RSS begins to cost."""
FIRST_PSS_S = 1.0
"""When PSS is first taken: late enough for workers to be up, early enough for most bursts."""
PSS_SPACING = 1.5
"""Each further PSS is taken when the burst is this many times as old: a slope for a handful of reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PssSample:
    """One reading of the tree's proportional set size."""

    at: float
    """In the clock's seconds."""
    pss_bytes: int
    processes: int
    """Processes in the tree at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeReading:
    """What a process tree took during one burst."""

    memory: MemoryUse | None
    """None where the tree could not be looked at even once."""
    cpu_share: float | None
    """CPU time of the tree as a share of the usable cores."""
    foreign_cpu_share: float | None
    """CPU time of everything else on the CPUs we may run on, as a share of them."""
    steal_share: float | None
    """CPU time that a hypervisor gave to others, as a share of those CPUs."""
    gpu: GpuUse
    gpu_samples: tuple[tuple[float, float], ...] = ()
    """NVML's own samples of its utilisation, in the clock's seconds, oldest first."""

    def added_to(self, measured: Measurement, gpu_held_bytes: int = 0) -> Measurement:
        """The measurement with what was seen from outside; what the burst itself knows of the GPU stays.

        Args:
            measured: what a burst knows of itself, its traces on this meter's clock.
            gpu_held_bytes: what the caller's own process holds on the GPU: the job will not need it twice.
        """
        return replace(
            measured,
            memory=self.memory,
            cpu_share=self.cpu_share,
            foreign_cpu_share=self.foreign_cpu_share,
            steal_share=self.steal_share,
            gpu=replace(
                self._gpu_within(measured),
                memory_bytes=None if self.gpu.memory_bytes is None else max(0, self.gpu.memory_bytes - gpu_held_bytes),
                busy_share=measured.gpu.busy_share,
                allocated_bytes=measured.gpu.allocated_bytes,
                copy_s=measured.gpu.copy_s,
            ),
        )

    def _gpu_within(self, measured: Measurement) -> GpuUse:
        """With the utilisation of the burst's very window, where NVML's samples cover it."""
        if not measured.traces:
            return self.gpu
        end = measured.traces[-1].step_end
        util = use_within(self.gpu_samples, end - measured.window_s, end)
        if util is None:
            return self.gpu
        return replace(self.gpu, util=util, reason=None if self.gpu.memory_bytes is not None else self.gpu.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One quick look; None where the tree is gone or the system does not tell."""

    tree: TreeUse | None
    shm: SharedMemory | None
    gpu: GpuSample | None = None


class TreeMeter:
    """Watches a process tree from entering to leaving a `with` block; then `reading` tells what it took.

    Args:
        root: Process at the root of the tree, or the tree.
        usable_cores: What CPU use is a share of.
        memory_budget_bytes: The tree may not outgrow 90 % of it; None for no alarm.
        memory_held_bytes: What the tree held before anything was run; it comes on top of the budget.
        on_memory_limit: Called once, on the meter's thread, when it does; it should end the burst.
        gpus: Where to ask about the GPU; None leaves it unwatched.
        cuda_index: Which GPU, as CUDA counts.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        root: int | ProcessTree,
        *,
        usable_cores: float,
        memory_budget_bytes: int | None = None,
        memory_held_bytes: int = 0,
        on_memory_limit: Callable[[], None] = lambda: None,
        gpus: Gpus | None = None,
        cuda_index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usable_cores = usable_cores
        self._clock = clock
        self._tree = root if isinstance(root, ProcessTree) else ProcessTree(root)
        self._cpus = affinity()
        self._gpus = gpus
        self._cuda_index = cuda_index
        self._gpu = _watched(gpus, cuda_index)
        budget = memory_budget_bytes
        self._guard = None if budget is None else MemoryGuard(budget, on_memory_limit, memory_held_bytes)
        self._pss: list[PssSample] = []
        self._next_pss_s = FIRST_PSS_S
        self._sampler = Sampler(self._look, period_s=PERIOD_S, clock=clock)
        self._looks: list[tuple[float, _Look]] = []
        self._host_before: HostCpu | None = None
        self._host_after: HostCpu | None = None
        self._gpu_samples: tuple[tuple[float, float], ...] = ()
        self._started = clock()

    def __enter__(self) -> TreeMeter:
        """Begin; the looks at the very start and end are made on the calling thread, so that they bound the burst."""
        self._started = self._clock()
        self._looks = [(self._started, self._quick_look())]
        self._host_before = host_cpu(self._cpus)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; at once, but for a look under way."""
        self._sampler.stop()
        self._looks += self._sampler.series
        last, now = self._quick_look(), self._clock()
        self._looks.append((now, last))
        if self._gpus is not None and self._gpu is not None:
            self._gpu_samples = tuple((now - ago, share) for ago, share in self._gpus.recent_use(self._gpu))
        self._host_after = host_cpu(self._cpus)
        self._take_pss(last.tree)

    @property
    def reading(self) -> TreeReading:
        """What the tree took; complete after the `with` block."""
        looks = self._looks
        samples = [(moment, look.gpu) for moment, look in looks if look.gpu is not None]
        cpu, foreign, steal = cpu_shares(
            [(moment, look.tree) for moment, look in looks],
            (self._host_before, self._host_after),
            elapsed_s=looks[-1][0] - looks[0][0],
            usable_cores=self._usable_cores,
        )
        return TreeReading(
            memory=memory_of([look.tree for _, look in looks], self._pss, [look.shm for _, look in looks]),
            cpu_share=cpu,
            foreign_cpu_share=foreign,
            steal_share=steal,
            gpu=gpu_use(samples, start=self._started) if self._gpu else _unwatched(self._gpus, self._cuda_index),
            gpu_samples=self._gpu_samples,
        )

    def _look(self) -> _Look:
        look = self._quick_look()
        now = self._clock()
        if now - self._started >= self._next_pss_s:
            self._next_pss_s = PSS_SPACING * max(self._next_pss_s, now - self._started)
            self._take_pss(look.tree)
        if self._guard is not None and look.tree is not None:
            self._guard.check(now, look.tree.rss_bytes, self._tree.pss_bytes)
        return look

    def _quick_look(self) -> _Look:
        gpu = None
        if self._gpus is not None and self._gpu is not None:
            gpu = self._gpus.sample(self._gpu)
        return _Look(tree=self._tree.use(), shm=shared_memory(), gpu=gpu)

    def _take_pss(self, use: TreeUse | None) -> None:
        pss_bytes = self._tree.pss_bytes() if use is not None else None
        if use is not None and pss_bytes is not None:
            self._pss.append(PssSample(at=self._clock(), pss_bytes=pss_bytes, processes=use.processes))


def memory_of(
    uses: Sequence[TreeUse | None], pss: Sequence[PssSample], shm: Sequence[SharedMemory | None]
) -> MemoryUse | None:
    """Peaks and slope of one burst; None where the tree was never seen."""
    rss = [use.rss_bytes for use in uses if use is not None]
    if not rss:
        return None
    in_use = [state.total_bytes - state.free_bytes for state in shm if state is not None]
    return MemoryUse(
        rss_bytes=max(rss),
        pss_bytes=max((sample.pss_bytes for sample in pss), default=None),
        pss_slope_bytes_per_s=pss_slope(pss),
        shm_bytes=max(in_use) - in_use[0] if in_use else None,
    )


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


def _watched(gpus: Gpus | None, cuda_index: int) -> GpuDevice | None:
    devices = gpus.devices() if gpus is not None else ()
    return next((device for device in devices if device.cuda_index == cuda_index), None)


def _unwatched(gpus: Gpus | None, cuda_index: int) -> GpuUse:
    return NO_GPU if gpus is None else GpuUse(reason=gpus.reason or f"NVML knows no cuda:{cuda_index}")
