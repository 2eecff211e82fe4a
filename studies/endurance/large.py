"""What does tuning data that lie in memory cost the caller beside them, and the machine?

    python -m studies.endurance.large --gigabytes 4

A process that holds so many gigabytes in one tensor, and one with a list of its rows, is tuned once with few bytes and then
with all of them. Peaks of the caller are the kernel's (VmHWM); those of the machine are what MemAvailable fell by.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from autotune_loader import tune

ROW = 4096  # float32: 16 KiB a sample
MOST_EXTRA_BYTES = 200e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    options = parser.parse_args()
    run(TensorDataset(torch.zeros(256, ROW)))  # imports
    data = torch.ones(int(options.gigabytes * 1e9) // (4 * ROW), ROW)
    print(
        "| data | GB | extra in the caller, MB | taken from the machine, MB | seconds | ran |\n|---|---|---|---|---|---|"
    )
    worst = max(
        report("one tensor", TensorDataset(data), data.nbytes), report("list of its rows", list(data), data.nbytes)
    )
    return 1 if worst > MOST_EXTRA_BYTES else 0


def report(name: str, dataset: Any, size: int) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak_bytes(), time.monotonic()
    with Lowest() as lowest:
        result = run(dataset)
    extra, seconds = peak_bytes() - before, time.monotonic() - begun
    inline = any("isolation='inline'" in warning for warning in result.warnings)
    where = "inline" if inline else "in a process of its own"
    print(f"| {name} | {size / 1e9:.1f} | {extra / 1e6:.0f} | {lowest.fallen / 1e6:.0f} | {seconds:.0f} | {where} |")
    return extra


def run(dataset: Any) -> Any:
    return tune(dataset, batch_size=64, budget=10, max_trials=4, max_workers=2, reuse=False, progress=False)


def peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def available_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024


class Lowest:
    """By how much the machine's available memory falls at the most."""

    def __enter__(self) -> Lowest:
        self._before, self.fallen, self._over = available_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.fallen = max(self.fallen, self._before - available_bytes())


if __name__ == "__main__":
    sys.exit(main())
