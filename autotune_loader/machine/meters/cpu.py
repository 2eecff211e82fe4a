"""Shares of the CPUs that a process tree, everyone else and the hypervisor took during a burst."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_loader.machine.host import HostCpu
from autotune_loader.machine.processes import TreeUse


def cpu_shares(
    uses: Sequence[tuple[float, TreeUse | None]],
    host: tuple[HostCpu | None, HostCpu | None],
    *,
    elapsed_s: float,
    usable_cores: float,
) -> tuple[float | None, float | None, float | None]:
    """CPU shares of the tree, of everyone else, and of the hypervisor between two looks, each None where not known."""
    known = [use.cpu_s for _, use in uses if use is not None]
    tree_s = known[-1] - known[0] if len(known) > 1 else None
    share = tree_s / (elapsed_s * usable_cores) if tree_s is not None and elapsed_s > 0 else None
    before, after = host
    if before is None or after is None or elapsed_s <= 0 or not after.cpus:
        return share, None, None
    capacity_s = elapsed_s * after.cpus
    # Ticks of the host and of the tree are counted apart and may differ by one: no foreign load is not less than none.
    foreign = None if tree_s is None else max(0.0, after.busy_s - before.busy_s - tree_s) / capacity_s
    return share, foreign, (after.steal_s - before.steal_s) / capacity_s
