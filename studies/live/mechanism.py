"""Does AutoLoader deliver what a DataLoader would, whatever changes or dies in between, and what does that cost?

    python -m studies.live.mechanism                       # reduced numbers, about three minutes on two cores
    python -m studies.live.mechanism --schedules 1000 --kills 200 --rounds 15
    python -m studies.live.mechanism --case 17             # one schedule again

Prints each figure beside its goal. What is compared takes turns, in mixed order; CPU seconds are the parent's alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import AutoLoader as TunedLoader
from autotune_loader.values.config import LoaderConfig
from tests.support.schedules import FixedLoader as AutoLoader
from tests.support.schedules import Numbers, differences, draw_case, draw_config

HANG_S = 90.0
"""Nothing here takes so long unless it hangs; then all stacks are printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of the cost row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a word of a row's name")
    parser.add_argument("--case", type=int, help="run one schedule and say in what it differs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if options.case is not None:
        print(draw_case(options.case), differences(draw_case(options.case)) or "no difference", sep="\n")
        return 0
    rows: list[tuple[str, str, Callable[[], str]]] = [
        ("random schedules", "0 differences", lambda: schedules(options.schedules, options.seed)),
        ("cost, 0 workers", "<= 2 us a batch", lambda: cost_us(options.rounds, 0)),
        ("cost, 2 workers", "<= 20 us a batch", lambda: cost_us(options.rounds, 2)),
        ("cost of an epoch of one batch", "<= 50 us, the 10,000th like the first", epochs_us),
        ("kills", "0 lost, doubled, hangs, leftovers", lambda: kills(options.kills, options.seed)),
    ]
    for name, goal, row in rows:
        if options.only in name:
            print(f"{name:33} goal {goal:36} {row()}", flush=True)
    return 0


def schedules(count: int, seed: int) -> str:
    """Random schedules of changes x samplers x dataset kinds against a plain DataLoader."""
    begun, bad = time.monotonic(), []
    for number in range(seed, seed + count):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if found := differences(draw_case(number)):
            bad.append(f"case {number}: {', '.join(found)}")
    faulthandler.cancel_dump_traceback_later()
    return f"{len(bad)} of {count} differ ({time.monotonic() - begun:.0f} s) {'; '.join(bad[:5])}"


class Ready(Numbers):
    """A dataset that costs nothing, so that only the loader's own time is left."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def first_of(samples: list[int]) -> int:
    return samples[0]


def cost_us(rounds: int, workers: int) -> str:
    """CPU microseconds of the parent per batch beyond a plain DataLoader's, and of wall time."""
    batches = 4000 if workers else 8000
    pairs_cpu, pairs_wall, plain = [], [], []

    def run(loader_class: type[Any]) -> tuple[float, float]:
        loader = loader_class(Ready(batches * 8), batch_size=8, num_workers=workers, collate_fn=first_of)
        iterator = iter(loader)
        next(iterator)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in iterator:
            pass
        return (time.perf_counter() - wall) / batches * 1e6, (time.process_time() - cpu) / batches * 1e6

    for ours, theirs in paired(rounds, lambda: run(AutoLoader), lambda: run(DataLoader)):
        pairs_wall.append(ours[0] - theirs[0])
        pairs_cpu.append(ours[1] - theirs[1])
        plain.append(theirs[1])
    return (
        f"CPU {spread(pairs_cpu)} us beyond DataLoader's {statistics.median(plain):.0f}; wall {spread(pairs_wall)} us"
    )


def epochs_us() -> str:
    """Wall microseconds of an epoch of one batch beyond a plain DataLoader's, of the first and the last of many."""
    found = []
    for loader_class in (DataLoader, TunedLoader):
        loader, seconds = loader_class(TensorDataset(torch.rand(64, 4)), batch_size=64, num_workers=0), []
        for _ in range(10_000):
            begun = time.perf_counter()
            for _ in loader:
                pass
            seconds.append((time.perf_counter() - begun) * 1e6)
        found.append([statistics.median(seconds[part]) for part in (slice(100, 1100), slice(-1000, None))])
    return f"first {found[1][0] - found[0][0]:+.0f} us, last {found[1][1] - found[0][1]:+.0f} us beyond {found[0][0]:.0f} us"


def paired(rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> list[tuple[Any, Any]]:
    """Each once a round, in an order that is drawn."""
    rng, pairs = random.Random(0), []
    for _ in range(rounds):
        if rng.random() < 0.5:
            first = ours()
            pairs.append((first, theirs()))
        else:
            second = theirs()
            pairs.append((ours(), second))
    return pairs


def spread(values: list[float]) -> str:
    """Median, and the quarter on either side."""
    if len(values) < 2:
        return f"{values[0]:+.1f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f}, n = {len(values)})"


class Slow(Numbers):
    """3 ms a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003)
        return super().__getitem__(index)


class Killer(threading.Thread):
    """Kills a worker at a random moment, until so many are dead."""

    def __init__(self, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.left, self.killed, self._rng, self.is_off = kills, 0, random.Random(seed), threading.Event()

    def run(self) -> None:
        while self.killed < self.left and not self.is_off.wait(self._rng.uniform(0.15, 0.6)):
            workers = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
            if workers:
                os.kill(self._rng.choice(workers).pid, signal.SIGKILL)
                self.killed += 1


def kills(count: int, seed: int) -> str:
    """Workers killed at random moments of training, also while their number changes."""
    logging.getLogger("autotune_loader.autoloader").setLevel(logging.ERROR)
    rng, killer = random.Random(seed), Killer(count, seed)
    before = orphans()
    begun, epochs, bad, losses, raised = time.monotonic(), 0, 0, 0, 0
    expected = [list(range(i, min(i + 4, 200))) for i in range(0, 200, 4)]
    killer.start()
    while killer.is_alive():
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        loader = AutoLoader(Slow(200), batch_size=4, config=LoaderConfig(num_workers=rng.randint(1, 4)))
        seen = []
        try:
            for batch in loader:
                seen.append(batch[:, 0].tolist())
                if rng.random() < 0.2:
                    loader.change_to(draw_config(rng))
                if rng.random() < 0.3:
                    time.sleep(rng.uniform(0.0, 0.03))
        except RuntimeError:
            raised += 1  # three in a row without a batch in between
            expected_now = expected[: len(seen)]
        else:
            expected_now = expected
        bad += seen != expected_now
        losses, epochs = losses + loader.found.lost, epochs + 1
        del loader
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    time.sleep(0.2)
    left = len(multiprocessing.active_children())
    segments = orphans() - before
    return (
        f"{killer.killed} killed in {epochs} epochs, {losses} workers replaced: {bad} epochs with lost or doubled batches, "
        f"0 hangs, {left} processes and {len(segments)} segments left, {raised} epochs ended by torch's error "
        f"({time.monotonic() - begun:.0f} s)"
    )


def orphans() -> set[str]:
    """Torch's segments of processes that have ended."""
    names = {path.name for path in Path("/dev/shm").glob("torch_*")}
    return {name for name in names if not Path("/proc", name.split("_")[1]).exists()}


if __name__ == "__main__":
    sys.exit(main())
