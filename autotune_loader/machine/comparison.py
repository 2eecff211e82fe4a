"""How two machines differ in what a configuration depends on, and whether it may be slow or fail on the other one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Fingerprint

ALIKE = 0.05
"""Kernels of one machine type differ in what they keep for themselves."""
COMPARED = {
    "usable_cores": ("usable cores", "its workers may be too many"),
    "memory_bytes": ("memory", "its workers may not fit"),
    "shm_bytes": ("shared memory", "batches in flight may not fit"),
    "gpus": ("GPU", "the step takes another time"),
    "dataset": ("dataset", "a sample costs another time"),
}
"""What a field is called, and what a difference does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field in which two machines differ."""

    field: str
    sentence: str
    """With both values, the tuned machine's first."""
    matters: bool
    """Whether the configuration may be slow or fail here; False is worth knowing only."""


def differences(tuned: Fingerprint, here: Fingerprint) -> list[Difference]:
    """Where `here` differs from the machine that was `tuned` on; what either side does not know is no difference."""
    found = []
    for name, (what, effect) in COMPARED.items():
        before, now = getattr(tuned, name), getattr(here, name)
        if before in (None, "") or now in (None, "") or before == now:
            continue
        if name.endswith("_bytes") and abs(now - before) <= ALIKE * before:
            continue
        matters = _matters(name, before, now)
        if name == "usable_cores" and not matters:
            effect = "more workers may be faster"
        sentence = f"{what}: {_text(before)} then, {_text(now)} here"
        is_told = matters or name == "usable_cores"
        found.append(Difference(field=name, sentence=f"{sentence}; {effect}" if is_told else sentence, matters=matters))
    return found


def _matters(name: str, before: Any, now: Any) -> bool:
    if name == "gpus":  # how many there are is the launcher's business; another model takes another time for a step
        return set(before) != set(now)
    return name == "dataset" or bool(now < before)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return f"{value / 2**20:.0f} MiB" if isinstance(value, int) and value >= 1 << 20 else str(value)
