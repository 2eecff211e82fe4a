"""What a measurement depends on of a machine, as a saved configuration carries it, and how another machine differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

ALIKE = 0.05
"""Kernels of one machine type differ in what they keep for themselves."""
NO_GPU = "none"
COMPARED = {
    "usable_cores": ("usable cores", "its workers may be too many", "more workers may be faster"),
    "memory_bytes": ("memory", "its workers may not fit", ""),
    "shm_bytes": ("shared memory", "batches in flight may not fit", ""),
    "gpu": ("GPU", "the step takes a different time", ""),
    "dataset": ("dataset", "a sample takes a different time", ""),
}
"""What a field is called, what a difference that matters does, and what another one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a measurement depends on, as plain JSON values; None means not known."""

    usable_cores: int
    """Cores one rank may count on."""
    memory_bytes: int | None = None
    """The tightest limit, not what happened to be free."""
    shm_bytes: int | None = None
    """Size of `/dev/shm`."""
    gpu: str | None = NO_GPU
    """Name of the GPU that steps run on."""
    dataset: str = ""
    """Class and length."""
    torch: str | None = None
    """Its version, which is told and not compared."""


class Difference(NamedTuple):
    """One thing in which two machines differ."""

    sentence: str
    """With both values, the tuned machine's first."""
    matters: bool
    """Whether the configuration may be slow or fail here; False is worth knowing only."""


def differences(tuned: Fingerprint, here: Fingerprint) -> list[Difference]:
    """Where `here` differs from the machine that was `tuned` on; what either side does not know is no difference."""
    found = []
    for name, (what, worse, better) in COMPARED.items():
        before, now = getattr(tuned, name), getattr(here, name)
        if before in (None, "") or now in (None, "") or before == now:
            continue
        if name.endswith("_bytes") and abs(now - before) <= ALIKE * before:
            continue
        matters = isinstance(now, str) or now < before
        effect = worse if matters else better
        sentence = f"{what}: {_text(before)} then, {_text(now)} here" + (f"; {effect}" if effect else "")
        found.append(Difference(sentence, matters))
    return found


def _text(value: Any) -> str:
    return f"{value / 2**20:.0f} MiB" if isinstance(value, int) and value >= 1 << 20 else str(value)
