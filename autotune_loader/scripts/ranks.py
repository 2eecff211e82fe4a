"""What the ranks of a job waited for, told by rank 0: each leaves its figures in a folder that all on the machine share."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from autotune_loader.diagnosis.units import share_text

PATIENCE_S = 3.0
"""Ranks end together; whoever needs longer is not waited for."""
ALIKE = 0.05
"""Shares of waiting that differ by less are the same."""


def leave(folder: str, rank: int, ranks: int, share: float | None) -> None:
    """Write what this rank's training loader was waited for, as a share of its time; where rank 0 is on this machine."""
    if rank >= _beside_rank_0(ranks):
        return  # nobody would read it, and nobody remove it
    with contextlib.suppress(OSError):
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        part = Path(folder, f"rank-{rank}.part")
        part.write_text(json.dumps(share))
        part.replace(part.with_suffix(".json"))


def gather(folder: str, ranks: int, *, patience_s: float = PATIENCE_S) -> dict[int, float]:
    """Shares of waiting by rank, of those that have left theirs; ranks of other machines do not."""
    end = time.monotonic() + patience_s
    while len(found := list(Path(folder).glob("rank-*.json"))) < _beside_rank_0(ranks) and time.monotonic() < end:
        time.sleep(0.02)
    shares = {int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in found}
    return {rank: share for rank, share in sorted(shares.items()) if share is not None}


def _beside_rank_0(ranks: int) -> int:
    """How many ranks rank 0's machine has, itself included: the first ones, as launchers number them."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))


def sentence(shares: Mapping[int, float], ranks: int) -> str | None:
    """Which rank waits most, and how much of the others' time its loader costs; None for less than two ranks.

    Ranks meet in each step. Where one waits for its data, the others wait for it there: by so much as it waits longer.
    """
    if len(shares) < 2:
        return None
    slowest = max(shares, key=lambda rank: shares[rank])
    others = median(share for rank, share in shares.items() if rank != slowest)
    seen = "" if len(shares) == ranks else f" Of {ranks} ranks, {len(shares)} are known here."
    if shares[slowest] - others < ALIKE:
        low, high = share_text(min(shares.values())), share_text(max(shares.values()))
        return f"All ranks wait for data alike: {low} to {high} of their time.{seen}"
    return (
        f"Rank {slowest} waits most for data: {share_text(shares[slowest])} of its time, the others {share_text(others)}. "
        f"Its loader costs every rank about {share_text(shares[slowest] - others)} of the time.{seen}"
    )
