"""What does it cost until a worker is there? torch's DataLoader beside AutoLoader, one fresh process for each, in turns.

    python -m studies live.births                             # all groups, about half an hour on two cores
    python -m studies live.births --only spawn --rounds 5     # groups with a word; --quick: whether the study works

Run it by the Python whose default start method is asked for. CPU seconds are of all processes below the training, as is PSS:
shared pages count once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from studies import processes
from studies.processes import NoAnswerError
from studies.study import Row, Table

ANEW = ("spawn", "forkserver")
"""Start methods whose workers begin in a process of their own."""
MOST_CPU_S, MOST_PSS_MB, MOST_RATIO, FURTHER_MS, STEP_MS = 2.5, 400.0, 1.3, 30.0, 100.0
UNCHANGED_S, CHANGED_S = 0.2, 1.2
"""Of the boundary between two epochs."""
BAR = "medians, in the column `bar`: 8 workers of spawn or forkserver cost at most 1.3 x torch's one"
SIZE, EPOCH_BATCHES, FEWEST_BOUNDARIES, LATE_S = 32, 40, 3, 120.0
"""Samples and batches; boundaries to measure; a further worker that has delivered nothing after this has failed."""
STEP_S, WARM_STEPS = 0.001, 50
"""Of the training while workers are waited for, so that it leaves them the cores; steps before they are."""


class Sizes(NamedTuple):
    """How much is measured: entries of the data, workers beside one, batches before memory is read, and so on."""

    entries: int = 1_200_000
    many: int = 8
    batches: int = 500
    further: int = 24
    boundaries: int = 19
    limit_s: float = 60.0


QUICK = Sizes(60_000, 3, 50, 3, 3, 5.0)


class Entries(Dataset[Any]):
    """So many entries: names, labels, boxes and weights. A sample tells who made it when, and of which epoch its data are."""

    def __init__(self, count: int) -> None:
        self.names = [f"train/class_{index % 1000:04d}/image_{index:08d}.jpg" for index in range(count)]
        self.labels = np.arange(count) % 1000
        self.boxes = np.random.default_rng(0).random((count, 4), dtype=np.float32)
        self.weights = torch.ones(count)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        begun, box = time.monotonic(), torch.from_numpy(self.boxes[index]) * self.weights[index]
        return os.getpid(), begun, self.epoch, len(self.names[index]), int(self.labels[index]), box


class Endless:
    """A sampler of an epoch that does not end while anything is measured."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 1 << 30

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(self.count))


# Jobs, each of a fresh process: figures of one side, `torch` or `ours`.


def loader_of(side: str, data: Dataset[Any], workers: int, **other: Any) -> Any:
    from autotune_loader import AutoLoader

    kind, own = (AutoLoader, {"tune": False}) if side == "ours" else (DataLoader, {})
    return kind(data, batch_size=SIZE, num_workers=workers, **own, **other)


def children_cpu_s() -> float:
    """CPU seconds of all processes below this one, of those that have ended, too."""
    from autotune_loader.machine.processes import tree, tree_use

    use, ended = tree_use(tree(os.getpid())[1:]), os.times()
    return (use.cpu_s if use else 0.0) + ended.children_user + ended.children_system


def start(side: str, method: str, workers: int, entries: int, batches: int) -> dict[str, float]:
    """From `iter()` until every worker has delivered a batch: wall and CPU; memory so many batches later."""
    from autotune_loader.machine.processes import tree, tree_pss

    multiprocessing.set_start_method(method)
    loader = loader_of(side, Entries(entries), workers, sampler=Endless(entries))
    begun, cpu_s = time.monotonic(), children_cpu_s()
    iterator = iter(loader)
    iter_s, seen, first = time.monotonic() - begun, set[int](), list[float]()
    while len(seen) < workers:
        pids, times, *_ = next(iterator)
        seen |= set(pids.tolist())
        first.append(float(times[0]))
    wall_s, cpu_s = time.monotonic() - begun, children_cpu_s() - cpu_s
    for _ in range(batches):
        next(iterator)
    pss_mb = (tree_pss(tree(os.getpid())[1:]) or 0) / 1e6
    return {"iter_s": iter_s, "sample_s": min(first) - begun, "wall_s": wall_s, "cpu_s": cpu_s, "pss_mb": pss_mb}


def further(method: str, workers: int, entries: int) -> dict[str, list[float]]:
    """So many further workers in mid-epoch, one after the other: until one is there, and until its first sample begins."""
    from autotune_loader.machine.processes import tree
    from autotune_loader.values import LoaderConfig
    from tests.support.schedules import FixedLoader

    multiprocessing.set_start_method(method)
    loader = FixedLoader(Entries(entries), batch_size=SIZE, num_workers=2, sampler=Endless(entries))
    iterator, seen = iter(loader), set[int]()
    while len(seen) < 2:
        seen.add(int(next(iterator)[0][0]))
    there, sample = list[float](), list[float]()
    for number in range(3, 3 + workers):
        before, asked_at, is_there = set(tree(os.getpid())), time.monotonic(), False
        loader.change_to(LoaderConfig(num_workers=number, prefetch_factor=2))
        while len(seen) < number:
            pids, times, *_ = next(iterator)
            now = time.monotonic()
            if not is_there and set(tree(os.getpid())) - before:
                is_there = True
                there.append(now - asked_at)
            if int(pids[0]) not in seen:
                seen.add(int(pids[0]))
                sample.append(float(times[0]) - asked_at)
            if now > asked_at + LATE_S:
                raise TimeoutError(f"worker {number} has delivered nothing")
            time.sleep(STEP_S)
    return {"there_s": there, "sample_s": sample}


def unasked(side: str, method: str, entries: int) -> dict[str, float]:
    """The longest step of a loop for which nobody asked for workers, until two have delivered; of torch's without any."""
    from autotune_loader.values import LoaderConfig
    from tests.support.schedules import FixedLoader

    multiprocessing.set_start_method(method)
    is_ours, seen, longest_s, begun, number = side == "ours", set[int](), 0.0, time.monotonic(), 0
    loader: Any = (FixedLoader if is_ours else DataLoader)(Entries(entries), batch_size=SIZE, sampler=Endless(entries))
    iterator = iter(loader)
    while len(seen) < (3 if is_ours else 1) or number < 3 * WARM_STEPS:
        if number == WARM_STEPS and is_ours:
            loader.change_to(LoaderConfig(num_workers=2, prefetch_factor=2))
        time.sleep(STEP_S)
        before = time.monotonic()
        seen |= set(next(iterator)[0].tolist())
        longest_s, number = max(longest_s, time.monotonic() - before if number > WARM_STEPS else 0.0), number + 1
        if before > begun + LATE_S:
            raise TimeoutError("workers have delivered nothing")
    return {"longest_s": longest_s}


def boundary(
    side: str, method: str, entries: int, boundaries: int, limit_s: float, is_changed: bool
) -> dict[str, float]:
    """From the last batch of an epoch to the first of the next, with 2 workers that are not kept."""
    multiprocessing.set_start_method(method)
    data = Entries(entries)
    loader = loader_of(side, data, 2, sampler=range(SIZE * EPOCH_BATCHES))
    begun, gaps, last = time.monotonic(), list[float](), 0.0
    for epoch in range(boundaries + 1):
        data.epoch = epoch if is_changed else 0
        for number, batch in enumerate(loader):
            now = time.monotonic()
            if last and not number:
                gaps.append(now - last)
            if batch[2].tolist() != [data.epoch] * SIZE:
                raise ValueError(f"epoch {epoch} has samples of epoch {batch[2].tolist()}")
            last = time.monotonic()
        if len(gaps) >= FEWEST_BOUNDARIES and last > begun + limit_s:
            break
    return {"boundary_s": statistics.median(gaps)}


# Groups of rows.

Found = Mapping[str, list[dict[str, Any]]]
"""What the jobs of a case returned, by side, one a round; empty where a process gave no answer."""


def answer(job: Callable[..., Any], **given: Any) -> dict[str, Any]:
    try:
        return dict(processes.answer(job, timeout_s=900.0, **given))
    except NoAnswerError as error:
        print(f"{job.__name__} {given}: {error}", file=sys.stderr, flush=True)
        return {}


def in_turns(rounds: int, ours: tuple[Any, dict[str, Any]], torchs: tuple[Any, dict[str, Any]]) -> Found:
    """Both sides take turns; every second round runs backwards."""
    sides, found = {"torch": torchs, "ours": ours}, {side: list[dict[str, Any]]() for side in ("torch", "ours")}
    for number in range(rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            job, given = sides[side]
            found[side].append(answer(job, **given))
    return found


def both(rounds: int, job: Any, **given: Any) -> Found:
    return in_turns(rounds, (job, {**given, "side": "ours"}), (job, {**given, "side": "torch"}))


def values(found: list[dict[str, Any]], name: str, times: float = 1.0) -> list[float]:
    each = [one[name] for one in found if one]
    return [times * value for value in (itertools.chain(*each) if each and isinstance(each[0], list) else each)]


def compared(figure: str, torchs: list[float], ours: list[float], bar: float | None = None) -> Row:
    """The median of ours is to be at most the bar; without an answer it is not met."""
    is_met = None if bar is None else bool(ours) and statistics.median(ours) <= bar
    return Row({"figure": figure, "torch": torchs, "AutoLoader": ours, "bar": "-" if bar is None else bar}, is_met)


def starts(method: str, rounds: int, sizes: Sizes) -> Table:
    """One worker and many over large data."""
    of, given = f"{method}, {sizes.entries:,} entries", {"method": method, "entries": sizes.entries}
    one, many = (both(rounds, start, workers=n, batches=sizes.batches, **given) for n in (1, sizes.many))
    bars = {"cpu_s": MOST_CPU_S, "wall_s": None, "pss_mb": MOST_PSS_MB}
    for count, found in ((1, one), (sizes.many, many)):
        for name, bar in bars.items():
            sides = (values(found[side], name) for side in ("torch", "ours"))
            yield compared(f"{of}, workers: {count}, {name}", *sides, bar if count > 1 else None)
    for name in ("cpu_s", "wall_s"):
        torchs = statistics.median(values(one["torch"], name) or [float("nan")])
        sides = (values(many[side], name, 1 / torchs) for side in ("torch", "ours"))
        yield compared(f"{of}: {name} of {sizes.many}, to torch's of 1", *sides, MOST_RATIO)


def further_workers(rounds: int, sizes: Sizes) -> Table:
    """AutoLoader's in mid-epoch; of torch a whole start of one."""
    for method in (*ANEW, "fork"):
        given = {"method": method, "entries": sizes.entries}
        whole = (start, {"side": "torch", "workers": 1, "batches": 0, **given})
        found = in_turns(rounds, (further, {"workers": sizes.further, **given}), whole)
        of = f"each of {sizes.further} further workers, {method}: ms until"
        there = values(found["torch"], "iter_s", 1e3), values(found["ours"], "there_s", 1e3)
        yield compared(f"{of} its process is there", *there, FURTHER_MS)
        sample = values(found["torch"], "sample_s", 1e3), values(found["ours"], "sample_s", 1e3)
        yield compared(f"{of} its first sample begins", *sample)  # all begin at once, on few cores


def nobody_asked(rounds: int, sizes: Sizes) -> Table:
    """Workers that nobody asked for begin beside the loop."""
    for method, entries in itertools.product((*ANEW, "fork"), (sizes.entries // 6, sizes.entries)):
        found = both(rounds, unasked, method=method, entries=entries)
        sides = (values(found[side], "longest_s", 1e3) for side in ("torch", "ours"))
        figure = f"longest step where nobody asked, {method}, {entries:,} entries: ms"
        yield compared(figure, *sides, None if method == "fork" else STEP_MS)


def epoch_boundaries(rounds: int, sizes: Sizes) -> Table:
    """An epoch after another, with workers that are not kept."""
    shared = {"entries": sizes.entries, "boundaries": sizes.boundaries, "limit_s": sizes.limit_s}
    for method, is_changed in (*itertools.product(ANEW, (False, True)), ("fork", False)):
        found = both(rounds, boundary, method=method, is_changed=is_changed, **shared)
        sides = (values(found[side], "boundary_s") for side in ("torch", "ours"))
        figure = f"epoch boundary, {method}, data {'changed' if is_changed else 'unchanged'}: s"
        bar = CHANGED_S if is_changed else UNCHANGED_S
        yield compared(figure, *sides, None if method == "fork" else bar)


GROUPS: dict[str, Callable[[int, Sizes], Table]] = {
    "entries, spawn": lambda rounds, sizes: starts("spawn", rounds, sizes),
    "entries, forkserver": lambda rounds, sizes: starts("forkserver", rounds, sizes),
    "further workers": further_workers,
    "nobody asked": nobody_asked,
    "epoch boundary": epoch_boundaries,
}


def rows(*, only: str = "", rounds: int = 3, quick: bool = False) -> Table:
    for name, group in GROUPS.items():
        if only in name:
            for row in group(1 if quick else rounds, QUICK if quick else Sizes()):
                yield row._replace(is_met=None) if quick and isinstance(row, Row) else row
