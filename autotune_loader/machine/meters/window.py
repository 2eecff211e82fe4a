"""What a burst takes of the machine in its window, read by the process that runs it, while its workers live.

start-up │ open ── window ── close │ shutdown        CPU: between the two; memory: once, when the window has closed
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from autotune_loader.machine.host import HostCpu, host_cpu
from autotune_loader.machine.limits import affinity, shared_memory
from autotune_loader.machine.processes import TreeUse, tree, tree_pss, tree_use
from autotune_loader.values.measurement import Measurement, MemoryUse


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    """Seconds."""
    tree: TreeUse | None
    host: HostCpu | None


class Window:
    """Watches this process and its descendants between two moments."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._cpus = affinity()
        self._shm_before = _shm_in_use()
        self._opened = self._look()
        self._most: MemoryUse | None = None
        """Memory as it was noted while the window was open."""

    def open(self) -> None:
        """The window begins: what start-up took is not counted."""
        self._opened = self._look()

    def note_memory(self) -> None:
        """Read memory now, where workers may have ended before the window closes."""
        self._most = _larger(self._most, self._memory(tree_use(tree(self._pid))))

    def closed(self, measured: Measurement) -> Measurement:
        """The measurement with what the machine gave meanwhile; called while the workers live. CPU is a share of one core."""
        now, before = self._look(), self._opened
        elapsed_s = now.at - before.at
        own_s = now.tree.cpu_s - before.tree.cpu_s if now.tree is not None and before.tree is not None else None
        share = own_s / elapsed_s if own_s is not None and elapsed_s > 0 else None
        measured = replace(measured, memory=_larger(self._most, self._memory(now.tree)), cpu_share=share)
        if now.host is None or before.host is None or not now.host.cpus or elapsed_s <= 0:
            return measured
        capacity_s = elapsed_s * now.host.cpus
        # Ticks of the host and of the tree are counted apart and may differ by one: no foreign load is not less than none.
        foreign_s = None if own_s is None else max(0.0, now.host.busy_s - before.host.busy_s - own_s)
        return replace(
            measured,
            foreign_cpu_share=None if foreign_s is None else foreign_s / capacity_s,
            steal_share=(now.host.steal_s - before.host.steal_s) / capacity_s,
        )

    def _look(self) -> _Look:
        return _Look(time.monotonic(), tree_use(tree(self._pid)), host_cpu(self._cpus))

    def _memory(self, use: TreeUse | None) -> MemoryUse | None:
        if use is None:
            return None
        shm, before = _shm_in_use(), self._shm_before
        return MemoryUse(
            rss_bytes=use.rss_bytes,
            pss_bytes=tree_pss(tree(self._pid)),
            shm_bytes=None if shm is None or before is None else max(0, shm - before),
        )


def _larger(one: MemoryUse | None, other: MemoryUse | None) -> MemoryUse | None:
    if one is None or other is None:
        return one or other
    return one if one.taken_bytes > other.taken_bytes else other


def _shm_in_use() -> int | None:
    room = shared_memory()
    return None if room is None else room.total_bytes - room.free_bytes
