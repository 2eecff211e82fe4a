"""What a burst takes of the machine in its window, read by the process that runs it, while its workers live.

    watch │ start-up │ open ─── window ─── close        nothing that takes long happens between the last two

The tree of processes is looked for while workers start, and again when the window has closed. At its edges only the counters
of known processes are read.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from autotune_loader.machine.host import host_cpu
from autotune_loader.machine.limits import affinity, shared_memory, usable_cores
from autotune_loader.machine.processes import tree, tree_pss, tree_use
from autotune_loader.values import Measurement, MemoryUse


class Window:
    """Watches this process and its descendants between two moments.

    Args:
        reads_pss: whether memory is read when the window has closed, which stalls the processes for some milliseconds each:
            once is enough for each configuration. Otherwise the measurement tells of no memory.
    """

    def __init__(self, *, reads_pss: bool = True) -> None:
        self._reads_pss, self._cpus, self._cores = reads_pss, affinity(), usable_cores().usable
        self._shm_before = _shm_in_use()
        self.watch()
        self.open()

    def watch(self) -> None:
        """Look who belongs to us, once all workers have been started and nothing is timed yet."""
        self._members = tree(os.getpid())

    def open(self) -> None:
        """The window begins: what start-up took is not counted."""
        self._use, self._host = tree_use(self._members), host_cpu(self._cpus)
        self._opened = time.monotonic()

    def closed(self, measured: Measurement) -> Measurement:
        """The measurement with what the machine gave meanwhile; called while the workers live."""
        elapsed_s, host = max(1e-9, time.monotonic() - self._opened), host_cpu(self._cpus)
        use, begun = tree_use(self._members), self._use
        members = tree(os.getpid())
        newer = tree_use(set(members) - set(self._members))
        own_s = read_bytes = foreign_share = None
        if use is not None and begun is not None:
            own_s = use.cpu_s - begun.cpu_s + (0.0 if newer is None else newer.cpu_s)
            if use.read_bytes is not None and begun.read_bytes is not None:
                read_bytes = max(0, use.read_bytes - begun.read_bytes) + (newer.read_bytes or 0 if newer else 0)
        if own_s is not None and host is not None and self._host is not None and host.cpus:
            # Ticks of the host and of the tree are counted apart and may differ by one: no foreign load is not less than none.
            foreign_s = max(0.0, host.busy_s - self._host.busy_s - own_s)
            foreign_share = foreign_s / (elapsed_s * host.cpus)
        return replace(
            measured,
            memory=self._memory(members) if self._reads_pss else None,
            cpu_share=None if own_s is None else own_s / (elapsed_s * self._cores),
            foreign_cpu_share=foreign_share,
            read_bytes=read_bytes,
        )

    def _memory(self, members: tuple[int, ...]) -> MemoryUse | None:
        use, shm, before = tree_use(members), _shm_in_use(), self._shm_before
        if use is None:
            return None
        taken = None if shm is None or before is None else max(0, shm - before)
        return MemoryUse(rss_bytes=use.rss_bytes, pss_bytes=tree_pss(members), shm_bytes=taken)


def _shm_in_use() -> int | None:
    room = shared_memory()
    return None if room is None else room.total_bytes - room.free_bytes
