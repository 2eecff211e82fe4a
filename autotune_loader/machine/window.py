"""What a burst takes of the machine in its window, read by the process that runs it, while its workers live.

start-up │ open ── window ── close │ shutdown        CPU: between the two; memory: once, when the window has closed
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import psutil

from autotune_loader.machine.host import host_cpu
from autotune_loader.machine.limits import affinity, shared_memory
from autotune_loader.machine.processes import TreeUse, tree, tree_pss, tree_use
from autotune_loader.values.measurement import Measurement, MemoryUse


class Window:
    """Watches this process and its descendants between two moments."""

    def __init__(self) -> None:
        self._cpus = affinity()
        self._shm_before = _shm_in_use()
        self._most: MemoryUse | None = None
        """Memory as it was noted while the window was open."""
        self.open()

    def open(self) -> None:
        """The window begins: what start-up took is not counted."""
        use, self._host = tree_use(tree(os.getpid())), host_cpu(self._cpus)
        self._opened, self._cpu_s = time.monotonic(), None if use is None else use.cpu_s

    def note_memory(self) -> None:
        """Read memory now, where workers may have ended before the window closes."""
        members = tree(os.getpid())
        self._note(members, tree_use(members))

    def closed(self, measured: Measurement) -> Measurement:
        """The measurement with what the machine gave meanwhile; called while the workers live. CPU is a share of one core."""
        elapsed_s, members = max(1e-9, time.monotonic() - self._opened), tree(os.getpid())
        use, host = tree_use(members), host_cpu(self._cpus)
        self._note(members, use)
        own_s = None if use is None or self._cpu_s is None else use.cpu_s - self._cpu_s
        measured = replace(measured, memory=self._most, cpu_share=None if own_s is None else own_s / elapsed_s)
        if host is None or self._host is None or not host.cpus:
            return measured
        capacity_s = elapsed_s * host.cpus
        # Ticks of the host and of the tree are counted apart and may differ by one: no foreign load is not less than none.
        foreign_s = None if own_s is None else max(0.0, host.busy_s - self._host.busy_s - own_s)
        return replace(
            measured,
            foreign_cpu_share=None if foreign_s is None else foreign_s / capacity_s,
        )

    def _note(self, members: Sequence[psutil.Process], use: TreeUse | None) -> None:
        """Keep the most memory that was seen."""
        if use is None:
            return
        shm, before = _shm_in_use(), self._shm_before
        now = MemoryUse(
            rss_bytes=use.rss_bytes,
            pss_bytes=tree_pss(members),
            shm_bytes=None if shm is None or before is None else max(0, shm - before),
        )
        if self._most is None or now.taken_bytes > self._most.taken_bytes:
            self._most = now


def of_cores(measured: Measurement, usable_cores: int) -> Measurement:
    """The measurement of another process, whose use of the CPU becomes a share of the cores that may be used."""
    cpu = measured.cpu_share
    return replace(measured, cpu_share=None if cpu is None else cpu / usable_cores)


def _shm_in_use() -> int | None:
    room = shared_memory()
    return None if room is None else room.total_bytes - room.free_bytes
