"""How two machines differ, and whether it matters to a configuration that was tuned on one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Fingerprint

# Kernels of one machine type differ in what they keep for themselves.
ALIKE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field in which two machines differ."""

    field: str
    sentence: str
    """With both values, the tuned machine's first."""
    matters: bool
    """Whether the configuration may be slow, fail or break here; False is worth knowing only."""


# What a field is called, and what a difference does, in the order in which differences are told.
_WORDS = {
    "usable_cores": ("usable cores", "its workers may be too many"),
    "memory_bytes": ("memory", "its workers may not fit"),
    "shm_bytes": ("shared memory", "batches in flight may not fit"),
    "gpus": ("GPU", "the step takes another time"),
    "driver": ("driver", ""),
    "torch": ("torch", ""),
    "python": ("Python", ""),
    "start_method": ("start method", "workers start in another way and may need a picklable dataset"),
    "thread_env": ("variables", "native libraries start another number of threads in workers"),
    "world_size": ("ranks on the node", "they share its cores and memory"),
    "platform": ("platform", "nothing measured there holds here"),
    "dataset": ("dataset", "a sample costs another time"),
}


def differences(tuned: Fingerprint, here: Fingerprint) -> list[Difference]:
    """Where `here` differs from the machine that was `tuned` on; what either side does not know is no difference."""
    found = []
    for name, (what, effect) in _WORDS.items():
        before, now = getattr(tuned, name), getattr(here, name)
        if before in (None, "") or now in (None, "") or before == now or _is_alike(name, before, now):
            continue
        matters = _matters(name, before, now)
        if name == "usable_cores" and not matters:
            effect = "more workers may be faster"
        sentence = f"{what}: {_text(before)} then, {_text(now)} here"
        if effect and (matters or name == "usable_cores"):
            sentence += f"; {effect}"
        found.append(Difference(field=name, sentence=sentence, matters=matters))
    return found


def _is_alike(name: str, before: Any, now: Any) -> bool:
    return name.endswith("_bytes") and abs(now - before) <= ALIKE * before


def _matters(name: str, before: Any, now: Any) -> bool:
    if name in ("usable_cores", "memory_bytes", "shm_bytes"):
        return bool(now < before)
    if name == "gpus":  # how many there are is the launcher's business; another model takes another time for a step
        return set(before) != set(now)
    if name == "torch":
        return bool(before.split(".")[:2] != now.split(".")[:2])
    return name not in ("driver", "python")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={each}" for key, each in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return f"{value / 2**20:.0f} MiB" if isinstance(value, int) and value >= 1 << 20 else str(value)
