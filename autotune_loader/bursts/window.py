"""What a burst takes of the machine in its window, read by the process that runs it, while its workers live.

    watch │ start-up │ open ─── window ─── close        nothing that takes long happens between the last two

The tree of processes is looked for while workers start, and again when the window has closed. At its edges only the counters
of known processes are read.
"""

from __future__ import annotations

import os
import time
from typing import Any

from autotune_loader.machine.limits import affinity, shared_memory
from autotune_loader.machine.processes import TreeUse, host_busy_s, tree, tree_pss, tree_use
from autotune_loader.values import MemoryUse


class Window:
    """Watches this process and its descendants between two moments.

    Args:
        usable_cores: as the run counts them, ranks and all.
        reads_pss: whether memory is read when the window has closed, which stalls the processes for some milliseconds each:
            once is enough for each configuration. Otherwise no memory is told of.
    """

    def __init__(self, usable_cores: int, *, reads_pss: bool) -> None:
        self._reads_pss, self._cpus, self._cores = reads_pss, affinity(), usable_cores
        self._shm = shared_memory()

    def watch(self) -> None:
        """Look who belongs to us, once all workers have been started and nothing is timed yet."""
        self._members = tree(os.getpid())

    def open(self) -> None:
        """The window begins: what start-up took is not counted."""
        self._use, self._busy_s = tree_use(self._members), host_busy_s(self._cpus)
        self._opened = time.monotonic()

    def close(self) -> dict[str, Any]:
        """What the machine gave meanwhile, by fields of `Measurement`; called while the workers live."""
        elapsed_s, busy_s = max(1e-9, time.monotonic() - self._opened), host_busy_s(self._cpus)
        use, begun, members = tree_use(self._members), self._use, tree(os.getpid())
        newer = tree_use(set(members) - set(self._members)) or TreeUse(cpu_s=0.0, rss_bytes=0)
        cpu_share = foreign_share = read_bytes = memory = None
        if use is not None and begun is not None:
            own_s = use.cpu_s - begun.cpu_s + newer.cpu_s
            cpu_share = own_s / (elapsed_s * self._cores)
            if busy_s and self._busy_s:
                # Ticks of the host and of the tree are counted apart and may differ by one: no foreign load is not less.
                foreign_s = max(0.0, sum(busy_s) - sum(self._busy_s) - own_s)
                foreign_share = foreign_s / (elapsed_s * len(busy_s))
            if use.read_bytes is not None and begun.read_bytes is not None:
                read_bytes = max(0, use.read_bytes - begun.read_bytes) + (newer.read_bytes or 0)
        if self._reads_pss and (taken := tree_use(members)) is not None:
            shm, before = shared_memory(), self._shm
            shm_bytes = None if shm is None or before is None else max(0, before.free_bytes - shm.free_bytes)
            memory = MemoryUse(rss_bytes=taken.rss_bytes, pss_bytes=tree_pss(members), shm_bytes=shm_bytes)
        return {"memory": memory, "read_bytes": read_bytes, "cpu_share": cpu_share, "foreign_cpu_share": foreign_share}
