"""Are the stages of a sample told right, and what does it cost to clock them?

    python -m studies.fidelity.stages [SECONDS]

Four known stages: reading waits, unpacking is one C call that holds the interpreter lock, augmenting is Python with thousands
of calls, collating computes with tensors. Batches that are clocked, that are not, and that are timed by hand take turns.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from autotune_loader.pipeline.stage_clock import StageClock
from autotune_loader.pipeline.stages import pooled, stage_times
from autotune_loader.values.stages import StageSamples

STAGES = ("read", "unpack", "augment", "collate")
BATCH, BLOCK = 4, 50
PACKED = zlib.compress(np.random.default_rng(0).integers(0, 8, 600_000, dtype=np.uint8).tobytes())


def crop(values: tuple[int, ...]) -> list[int]:
    return [value + 1 for value in values]


class Known(Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.augment(self.unpack(self.read(index)))

    def read(self, index: int) -> bytes:
        time.sleep(0.002)
        return PACKED

    def unpack(self, data: bytes) -> bytes:
        return zlib.decompress(data)

    def augment(self, data: bytes) -> torch.Tensor:
        total = sum(sum(crop((each, each + 1, each + 2))) for each in range(1200))
        return torch.frombuffer(bytearray(data[:60_000]), dtype=torch.uint8).float() + total


def joined(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torch.stack(samples)
    for _ in range(25):
        batch = batch * 1.0001
    return batch


class ByHand:
    """Seconds of each stage, by clocks that this study reads itself."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0.0)

    def timed(self, stage: str, function: Callable[[Any], Any], argument: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        answer = function(argument)
        self.cpu_s[stage] += time.thread_time() - cpu
        self.wall_s[stage] += time.perf_counter() - wall
        return answer

    def batch(self, data: Known) -> None:
        samples = []
        for index in range(BATCH):
            raw = self.timed("unpack", data.unpack, self.timed("read", data.read, index))
            samples.append(self.timed("augment", data.augment, raw))
        self.timed("collate", joined, samples)


def made(data: Known, clock: StageClock | None, tally: list[StageSamples]) -> float:
    """CPU seconds of a batch that is made as a worker makes it."""
    begun, cpu = time.perf_counter(), time.process_time()
    if clock is not None:
        clock.fetch()
    samples = [data[index] for index in range(BATCH)]
    if clock is not None:
        clock.collate(joined)
    joined(samples)
    took_s = time.process_time() - cpu
    if clock is not None:
        report = clock.batch(time.perf_counter() - begun, took_s, BATCH)
        took_s = time.process_time() - cpu
        if report is not None:
            tally.append(report)
    return took_s


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    data, tally, by_hand, costs = Known(), list[StageSamples](), ByHand(), list[float]()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        plain_s = sum(made(data, None, tally) for _ in range(BLOCK))
        clock = StageClock(data)
        clocked_s = sum(made(data, clock, tally) for _ in range(2 * BLOCK)) / 2
        clock.end()
        plain_s += sum(made(data, None, tally) for _ in range(BLOCK))
        costs.append(clocked_s / plain_s * 2 - 1)
        for _ in range(BLOCK // 5):
            by_hand.batch(data)
    shares = {each.stage: each for each in stage_times(pooled(tally))}
    shares["unpack"] = shares.pop("decode")  # zlib's is known to decode
    wall_s, cpu_s = sum(by_hand.wall_s.values()), sum(by_hand.cpu_s.values())
    print(f"{'stage':10}{'wall':>8}{'by hand':>9}{'CPU':>8}{'by hand':>9}")
    for stage in STAGES:
        told, wall, cpu = shares[stage], by_hand.wall_s[stage] / wall_s, by_hand.cpu_s[stage] / cpu_s
        print(f"{stage:10}{told.wall_share:8.1%}{wall:9.1%}{told.cpu_share:8.1%}{cpu:9.1%}  {told.where}")
    spread = 1.96 * stdev(costs) / len(costs) ** 0.5
    print(
        f"clocks cost {mean(costs):+.1%} ± {spread:.1%} of the CPU, median {median(costs):+.1%}, in {len(costs)} turns"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
