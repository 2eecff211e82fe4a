"""How two machines differ, and whether it matters to a configuration that was tuned on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field in which two machines differ."""

    field: str
    sentence: str
    """With both values, the tuned machine's first."""
    matters: bool
    """Whether the configuration may be slow, fail or break here; False is worth knowing only."""


def differences(tuned: Fingerprint, here: Fingerprint) -> list[Difference]:
    """Where `here` differs from the machine that was `tuned` on; what either side does not know is no difference."""
    found = []
    for name, compare in _COMPARISONS.items():
        before, now = getattr(tuned, name), getattr(here, name)
        if before is not None and now is not None and before != now:
            found += compare(name, before, now)
    return found


def _difference(name: str, sentence: str, *, matters: bool = True) -> list[Difference]:
    return [Difference(field=name, sentence=sentence, matters=matters)]


def _cores(name: str, before: float, now: float) -> list[Difference]:
    fewer = now < before
    effect = "its workers may be too many" if fewer else "more workers may be faster"
    what = {
        "usable_cores": "usable cores",
        "affinity_count": "CPUs in the affinity mask",
        "cpu_quota": "cores of quota",
    }
    # Affinity and quota only explain the usable cores, which are their minimum.
    matters = fewer and name == "usable_cores"
    return _difference(name, f"{what[name]}: {before:g} then, {now:g} here; {effect}", matters=matters)


def _size(name: str, before: int, now: int) -> list[Difference]:
    if abs(now - before) <= 0.05 * before:  # kernels of one machine type differ in what they keep for themselves
        return []
    what, effect = {
        "memory_bytes": ("memory", "its workers may not fit"),
        "shm_bytes": ("shared memory", "batches in flight may not fit"),
    }[name]
    sentence = f"{what}: {before / 2**20:.0f} MiB then, {now / 2**20:.0f} MiB here"
    return _difference(name, sentence + (f"; {effect}" if now < before else ""), matters=now < before)


def _gpus(name: str, before: tuple[str, ...], now: tuple[str, ...]) -> list[Difference]:
    # The number of GPUs is the launcher's business; another model changes the step that the loader has to feed.
    other = set(before) != set(now)
    sentence = f"GPU: {', '.join(before) or 'none'} then, {', '.join(now) or 'none'} here"
    return _difference(name, sentence + ("; the step takes another time" if other else ""), matters=other)


def _threads(name: str, before: dict[str, str], now: dict[str, str]) -> list[Difference]:
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    pairs = (f"{key}={before.get(key, 'unset')} then, {now.get(key, 'unset')} here" for key in changed)
    return _difference(name, f"{'; '.join(pairs)}: native libraries start another number of threads in workers")


def _version(what: str, *, minor_matters: bool) -> Callable[[str, str, str], list[Difference]]:
    def compare(name: str, before: str, now: str) -> list[Difference]:
        other = before.split(".")[:2] != now.split(".")[:2]
        return _difference(name, f"{what}: {before} then, {now} here", matters=other and minor_matters)

    return compare


def _word(what: str, effect: str) -> Callable[[str, Any, Any], list[Difference]]:
    def compare(name: str, before: Any, now: Any) -> list[Difference]:
        # An empty word means that it was not named.
        if "" in (before, now):
            return []
        return _difference(name, f"{what}: {before} then, {now} here; {effect}")

    return compare


# By field of the fingerprint, in the order in which differences are told.
_COMPARISONS: dict[str, Callable[[str, Any, Any], list[Difference]]] = {
    "usable_cores": _cores,
    "affinity_count": _cores,
    "cpu_quota": _cores,
    "memory_bytes": _size,
    "shm_bytes": _size,
    "gpus": _gpus,
    "driver": _version("driver", minor_matters=False),
    "torch": _version("torch", minor_matters=True),
    "python": _version("Python", minor_matters=False),
    "start_method": _word("start method", "workers start in another way and may need a picklable dataset"),
    "thread_env": _threads,
    "world_size": _word("ranks on the node", "they share its cores and memory"),
    "platform": _word("platform", "nothing measured there holds here"),
    "dataset": _word("dataset", "a sample costs another time"),
    "storage": _word("storage", "reading takes another time"),
}
