"""Does AutoLoader deliver what a DataLoader would, whatever changes or dies in between, and what does that cost?

    python -m studies.live.mechanism                       # reduced numbers, about three minutes on two cores
    python -m studies.live.mechanism --schedules 1000 --kills 200 --rounds 15
    python -m studies.live.mechanism --case 17             # one schedule again

Prints each figure beside its goal. What is compared takes turns, in mixed order; CPU seconds are the parent's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import AutoLoader
from autotune_loader.values import LoaderConfig
from tests.support.bursts import orphaned_segments
from tests.support.schedules import FixedLoader, Numbers, Slow, differences, draw_case, draw_config

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
        ("cost, 0 workers", "<= 5 us a batch", lambda: cost_us(options.rounds, 0)),
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


def seconds_of(loader_class: type[Any], batches: int, workers: int) -> tuple[float, float]:
    """Wall seconds of an epoch, and CPU seconds of this process."""
    asked = {"num_workers": workers} if workers else {}
    iterator = iter(loader_class(Ready(batches * 8), batch_size=8, collate_fn=first_of, **asked))
    next(iterator)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in iterator:
        pass
    return time.perf_counter() - wall, time.process_time() - cpu


def cost_us(rounds: int, workers: int) -> str:
    """CPU microseconds of the parent per batch beyond a plain DataLoader's, and of wall time."""
    rng, batches = random.Random(0), 4000 if workers else 8000
    found: list[dict[type[Any], tuple[float, float]]] = [
        {each: seconds_of(each, batches, workers) for each in rng.sample([FixedLoader, DataLoader], 2)}
        for _ in range(rounds)
    ]
    more = [(each[FixedLoader], each[DataLoader]) for each in found]
    wall, cpu = ([(ours[clock] - its[clock]) / batches * 1e6 for ours, its in more] for clock in (0, 1))
    plain = statistics.median(each[DataLoader][1] for each in found) / batches * 1e6
    return f"CPU {spread(cpu)} us beyond DataLoader's {plain:.0f}; wall {spread(wall)} us"


def epochs_us() -> str:
    """Wall microseconds of an epoch of one batch beyond a plain DataLoader's, of the first and the last of many."""
    found = []
    for loader_class in (DataLoader, AutoLoader):
        loader, ends = loader_class(TensorDataset(torch.rand(64, 4)), batch_size=64), [0.0]
        for _ in range(10_000):
            for _ in loader:
                pass
            ends.append(time.perf_counter() * 1e6)
        seconds = [after - before for before, after in itertools.pairwise(ends)]
        found.append([statistics.median(seconds[part]) for part in (slice(100, 1100), slice(-1000, None))])
    plain, ours = found
    return f"first {ours[0] - plain[0]:+.0f} us, last {ours[1] - plain[1]:+.0f} us beyond {plain[0]:.0f} us"


def spread(values: list[float]) -> str:
    """Median, and the quarter on either side."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f}, n = {len(values)})"


class Killer(threading.Thread):
    """Kills a worker at a random moment, until so many are dead."""

    def __init__(self, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.left, self.killed, self._rng, self.is_off = kills, 0, random.Random(seed), threading.Event()

    def run(self) -> None:
        while self.killed < self.left and not self.is_off.wait(self._rng.uniform(0.15, 0.6)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if workers := [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]:
                    self._rng.choice(workers).kill()
                    self.killed += 1


def kills(count: int, seed: int) -> str:
    """Workers killed at random moments of training, also while their number changes."""
    logging.getLogger("autotune_loader.autoloader").setLevel(logging.ERROR)
    rng, killer, before, begun = random.Random(seed), Killer(count, seed), orphaned_segments(), time.monotonic()
    expected = [list(range(i, i + 4)) for i in range(0, 200, 4)]
    epochs = bad = raised = 0
    killer.start()
    while killer.is_alive():
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        loader = FixedLoader(Slow(200, 0.003), batch_size=4, config=LoaderConfig(num_workers=rng.randint(2, 4)))
        seen, is_whole = [], True
        try:
            for batch in loader:
                seen.append(batch[:, 0].tolist())
                if rng.random() < 0.2:
                    loader.change_to(draw_config(rng))
                if rng.random() < 0.3:
                    time.sleep(rng.uniform(0.0, 0.03))
        except RuntimeError:  # three in a row without a batch in between
            raised, is_whole = raised + 1, False
        bad += seen != (expected if is_whole else expected[: len(seen)])
        epochs += 1
        del loader
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    time.sleep(0.2)
    left, segments = len(multiprocessing.active_children()), len(orphaned_segments() - before)
    return (
        f"{killer.killed} killed in {epochs} epochs: {bad} epochs with lost or doubled batches, "
        f"0 hangs, {left} processes and {segments} segments left, {raised} epochs ended by torch's error "
        f"({time.monotonic() - begun:.0f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
