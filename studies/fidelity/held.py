"""What a fetch costs while the batch before is alive, and after it is gone: `python -m studies.fidelity.held lesson`.

`for batch in loader` lets go of a batch once the next has arrived. Who lets go of it before, as a function does that takes
one batch and returns, leaves malloc with so much free memory at the top of the heap that it gives it back, and each batch is
written to fresh pages. That depends on what else lies there, so that processes differ: this tells the time and the page faults
of a batch without workers in some of them, by the median of a few turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

from studies.workloads import DOCUMENTS, WORKLOADS

WINDOW_S = 0.7
TURNS = 4


def batches(workload: str) -> Iterator[Any]:
    """Without workers, epoch after epoch."""
    from torch.utils.data import DataLoader

    study = (WORKLOADS | DOCUMENTS)[workload]()
    while True:
        yield from DataLoader(study.dataset, batch_size=study.batch_size, shuffle=True, drop_last=True)


def one_turn(arriving: Iterator[Any], *, held: bool) -> tuple[float, float]:
    """Milliseconds and page faults for each batch."""
    begun, before, count = time.perf_counter(), _faults(), 0
    batch = None
    while time.perf_counter() - begun < WINDOW_S:
        if not held:
            batch = None
        batch = next(arriving)
        count += 1
    del batch
    return 1000 * (time.perf_counter() - begun) / count, (_faults() - before) / count


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def in_this_process(workload: str) -> dict[str, tuple[float, float]]:
    """The medians of some turns, with and without the batch before, one after the other."""
    arriving = batches(workload)
    turns: dict[str, list[tuple[float, float]]] = {"held": [], "gone": []}
    for _ in range(TURNS):
        for name, mine in turns.items():
            mine.append(one_turn(arriving, held=name == "held"))
    return {
        name: (statistics.median(ms for ms, _ in mine), statistics.median(faults for _, faults in mine))
        for name, mine in turns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.held", description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
    parser.add_argument("--processes", type=int, default=8, help="one after the other")
    chosen = parser.parse_args()
    print("| process | held: ms a batch | page faults | gone: ms a batch | page faults |\n|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for number, told in enumerate(pool.imap(in_this_process, [chosen.workload] * chosen.processes)):
            cells = " | ".join(f"{ms:.1f} | {faults:.0f}" for ms, faults in told.values())
            print(f"| {number} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
