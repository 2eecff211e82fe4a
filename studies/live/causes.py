"""Does `watch` name the cause? Twelve causes, each injected into a training script, and healthy scripts without one.

    python -m studies live.causes                                # about eight minutes on two cores
    python -m studies live.causes --only pinning,storage         # some of the jobs
    python -m studies live.causes --busy                         # beside a busy process a core
    python -m studies live.causes --named-only                   # without what helps: half the time

The jobs are in `injected.py`. Each runs under `watch`; then what helps is done, and the job runs again: under `watch`, or under
`run` where that is what helps. What it brings is measured in seconds of the loops or in MB of all processes. Seconds of the
script's own clock are compared with those of the report: its wall, and the sum of its parts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values.units import counted
from studies.live import injected
from studies.processes import ROOT, NoAnswerError, answer, busy_neighbours
from studies.study import Row, Table
from tests.support.accelerator import built, compiler

BROUGHT, PARTS = 0.85, 0.01
"""What helps leaves at most so much of the seconds, or of the memory; parts and wall differ by at most so much."""
BAR = "exactly its own cause is named (beside busy processes also cores), and what helps takes 15% off; healthy: none"
ALWAYS = {"cores"}
"""True of every job beside busy processes."""


class Injected(NamedTuple):
    """A job that loses by one cause, with the number of issue 88, and what helps.

    `unit` is what is measured, "s" or "MB"; `verb` is "run" where that is what helps; `simulated` are settings of the
    simulated accelerator.
    """

    number: int
    kind: str
    job: Callable[..., dict[str, float]]
    helps: str
    unit: str = "s"
    verb: str = "watch"
    simulated: dict[str, float] | None = None


CAUSES = (
    Injected(1, "worker_starts", injected.worker_starts, "persistent_workers=True"),
    Injected(2, "worker_imports", injected.worker_imports, "run", verb="run"),
    Injected(3, "copied_pages", injected.copied_pages, "a numpy array", "MB"),
    Injected(4, "pinning", injected.pinning, "pin_memory=False", simulated={"pinning_s": 0.02}),
    Injected(5, "many_tensors", injected.many_tensors, "AutoLoader(tune=False)"),
    Injected(6, "garbage_collection", injected.garbage_in_workers, "gc.freeze()"),
    Injected(6, "garbage_collection", injected.garbage_in_loop, "gc.freeze()"),
    Injected(7, "slow_samples", injected.slow_samples, "run", verb="run"),
    Injected(8, "slow_rank", injected.slow_rank, "8 workers on the slow rank"),
    Injected(9, "idle_memory", injected.idle_memory, "persistent_workers=False", "MB"),
    Injected(10, "cores", injected.cores, "no workers in place of 8"),
    Injected(11, "storage", injected.storage, "12 workers in place of 2"),
    Injected(12, "device_in_worker", injected.device_in_worker, "the device in the loop", "MB", simulated={}),
    Injected(12, "training_memory", injected.training_memory, "forkserver, under run", "MB", "run"),
)
HEALTHY: dict[Callable[..., dict[str, float]], dict[str, float] | None] = {
    injected.decoded: None,
    injected.in_memory: None,
    injected.step_bound: None,
    injected.persistent: None,
    injected.validated: None,
    injected.checkpointed: None,
    injected.equal_ranks: None,
    injected.spawned: None,
    injected.pinned: {"pinning_s": 0.0},
    injected.twenty_keys: None,
}
"""Jobs with settings of the simulated accelerator, where they use it."""


class Seen(NamedTuple):
    """What a job measured of itself, and of its report the seconds of each kind of cause, the wall and the sum of its parts."""

    own: dict[str, float]
    causes: dict[str, float | None]
    wall_s: float | None
    parts_s: float | None

    @property
    def off(self) -> float | None:
        """How far the seconds of the report are from the script's own, as a share of these."""
        if self.wall_s is None or self.parts_s is None:
            return None
        return max(abs(each - self.own["s"]) for each in (self.wall_s, self.parts_s)) / self.own["s"]


def seen(job: Callable[..., Any], simulated: dict[str, float] | None, verb: str = "watch", **given: Any) -> Seen:
    environ = {}
    if simulated is not None:
        folder = built(ROOT / "build" / "accelerator")
        environ = {"PYTHONPATH": f"{ROOT}:{folder}", "SIMULATED": json.dumps(simulated)}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "report.json")
        under = ("-m", "autotune_loader", verb, "--json", str(path))
        own = answer(job, under=under, environ=environ, **given)
        loaders = json.loads(path.read_text())["loaders"]
    times = [each["time"] for each in loaders if each.get("time")]
    wall_s = sum(each["wall"] for each in times)
    parts_s = sum(sum(each.values()) for each in times) - wall_s
    causes = {its["kind"]: its.get("seconds") for each in reversed(loaders) for its in each.get("causes") or ()}
    return Seen(own, causes, wall_s if times else None, parts_s if times else None)


def named(found: list[Seen]) -> str:
    """The causes of one round after the other, if they differ."""
    return "; ".join(dict.fromkeys(", ".join(sorted(each.causes)) or "none" for each in found))


def known(values: list[float | None]) -> list[float]:
    return [each for each in values if each is not None]


def cells(job: Callable[..., Any], kind: str, found: list[Seen]) -> dict[str, object]:
    return {
        "job": job.__name__,
        "injected": kind or "nothing",
        "named": named(found),
        "its seconds": known([each.causes.get(kind) for each in found]),
        "parts off by, %": [100 * each for each in known([each.off for each in found])],
    }


class Count:
    """What the notes tell: rows of each cause in which it is named, wrong names, healthy jobs, and how far off seconds are."""

    def __init__(self) -> None:
        self.is_named, self.wrong, self.healthy, self.healthy_named = defaultdict[int, list[bool]](list), 0, 0, 0
        self.off = list[float]()

    def notes(self) -> Table:
        is_named = [all(each) for each in self.is_named.values()]
        yield f"named {sum(is_named)} of {counted(len(is_named), 'cause')}; {counted(self.wrong, 'wrong name')}"
        yield f"named a cause in {self.healthy_named} of {counted(self.healthy, 'healthy job')}"
        if self.off:
            close = sum(each <= PARTS for each in self.off)
            yield f"wall and parts within {PARTS:.0%} of the script's own seconds in {close} of {counted(len(self.off), 'run')}"


def cause_row(each: Injected, rounds: int, allowed: set[str], is_helped: bool, count: Count) -> Row:
    before, after = list[Seen](), list[Seen]()
    for _ in range(rounds):
        before.append(seen(each.job, each.simulated, cured=False))
        if is_helped:
            after.append(seen(each.job, each.simulated, each.verb, cured=True))
    is_named = all(each.kind in its.causes for its in before)
    wrong = {kind for its in before for kind in its.causes} - {each.kind} - allowed
    count.is_named[each.number].append(is_named)
    count.wrong += len(wrong)
    count.off += known([its.off for its in before])
    found, is_met = cells(each.job, each.kind, before), is_named and not wrong
    first, then = ([its.own[each.unit] for its in both] for both in (before, after))
    found |= {"what helps": each.helps, "in": each.unit, "before": first, "after": then}
    if after:
        is_met &= median(then) <= BROUGHT * median(first)
    return Row(found | {"named after": named(after) if after else "-"}, is_met)


def healthy_row(
    job: Callable[..., Any], simulated: dict[str, float] | None, rounds: int, allowed: set[str], count: Count
) -> Row:
    found = [seen(job, simulated) for _ in range(rounds)]
    is_quiet = not {kind for each in found for kind in each.causes} - allowed
    count.healthy += 1
    count.healthy_named += not is_quiet
    count.off += known([each.off for each in found])
    return Row(cells(job, "", found) | {"loops, s": [each.own["s"] for each in found]}, is_quiet)


def rows(*, only: str = "", busy: bool = False, rounds: int = 1, named_only: bool = False) -> Table:
    words, count, allowed = only.split(","), Count(), ALWAYS if busy else set[str]()
    is_chosen = lambda job: any(word in job.__name__ for word in words)  # noqa: E731
    chosen = [(each.job, each.simulated, each) for each in CAUSES if is_chosen(each.job)]
    chosen += [(job, simulated, None) for job, simulated in HEALTHY.items() if is_chosen(job)]
    with busy_neighbours(usable_cores().usable) if busy else contextlib.nullcontext():
        for job, simulated, cause in chosen:
            if simulated is not None and compiler() is None:
                yield f"{job.__name__} was left out: the simulated accelerator needs a C++ compiler"
                continue
            try:
                if cause is not None:
                    yield cause_row(cause, rounds, allowed, not named_only, count)
                else:
                    yield healthy_row(job, simulated, rounds, allowed, count)
            except NoAnswerError as error:
                yield Row({"job": job.__name__, "failed": str(error)}, False)
    yield from count.notes()
