"""What does tracing take from the rate? The same question as `tracing_cost`, within one running loader.

    python -m studies.fidelity.tracing_switched --lock /tmp/quiet.lock      # about 3 minutes

Two loaders differ by more than tracing costs: where their workers' processes and pages happen to lie. So here one loader
traces some blocks of batches and not others (traced, plain, plain, traced, ...), in its workers and in the loop, and each
traced block is compared with the plain one beside it. The batches of a block that were asked for before it are left out.
What the plain blocks still pay is the call of the wrapper and the count of the batches, about 0.3 us each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate

from autotune_loader.config import LoaderConfig
from autotune_loader.probe.run import Run
from autotune_loader.probe.traced import EndlessBatches, TracedCollate, TracedDataset, TracedWorkerInit
from autotune_loader.stats import correlated_mean_interval
from autotune_loader.trial import BurstPlan
from studies.fidelity.records import RESULTS, append
from studies.fidelity.tracing_cost import _parts
from studies.quiet import QuietTurns

RAW = RESULTS / "tracing_switched.jsonl"
CASES = (
    # workload, workers, batches a block, pairs of blocks
    ("cpu_10ms", 0, 20, 80),
    ("cpu_10ms", 2, 40, 100),
    ("in_memory", 0, 200, 600),
    ("in_memory", 2, 200, 200),
)
LEFT_OUT = 8
"""Batches at the start of each block: those that were asked for earlier, with two workers and prefetch 2, and as many again."""


class Switch:
    """Whether the next batch of this process is to be traced; a worker counts its own and knows how many others there are."""

    def __init__(self, block: int, workers: int) -> None:
        self.block, self.stride, self.number = block, max(1, workers), 0

    def starts_at(self, worker: int) -> None:
        self.number = worker

    def is_on(self) -> bool:
        return self.number // self.block % 4 in (0, 3)

    def next(self) -> None:
        self.number += self.stride


class SwitchedDataset(TracedDataset):
    def __init__(self, dataset: Any, switch: Switch) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_switch", switch)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if self._switch.is_on():
            return super().__getitems__(indices)
        inner = self._inner
        return [inner[index] for index in indices]


class SwitchedCollate(TracedCollate):
    def __init__(self, switch: Switch) -> None:
        super().__init__(default_collate, batched=True)
        self._switch = switch

    def __call__(self, samples: Any) -> Any:
        on = self._switch.is_on()
        self._switch.next()
        return super().__call__(samples) if on else default_collate(samples)


class SwitchedInit(TracedWorkerInit):
    def __init__(self, switch: Switch) -> None:
        super().__init__(None)
        self._switch = switch

    def __call__(self, worker: int) -> None:
        super().__call__(worker)
        self._switch.starts_at(worker)


def block_seconds(name: str, workers: int, block: int, pairs: int) -> list[float]:
    """Seconds per batch of each block, in the order traced, plain, plain, traced."""
    data, step = _parts(name)
    assert data.batch_size is not None
    switch = Switch(block, workers)
    loader = DataLoader(
        SwitchedDataset(data.dataset, switch),
        batch_sampler=EndlessBatches(BatchSampler(data.sampler, data.batch_size, data.drop_last)),  # type: ignore[arg-type]
        collate_fn=SwitchedCollate(switch),
        worker_init_fn=SwitchedInit(switch),
        multiprocessing_context="fork" if workers else None,  # the switch is shared by being copied
        **LoaderConfig(num_workers=workers, prefetch_factor=2 if workers else None).to_kwargs(),
    )
    iterator = iter(loader)
    run = Run(BurstPlan(max_s=1e6, min_s=0.1, relative_error=0.0), workers, time.monotonic())

    def traced() -> None:
        run.deliver(iterator, step)
        run.knows_enough()

    def plain() -> None:
        step.run(next(iterator))

    found = []
    for number in range(2 * pairs):
        deliver = traced if number % 4 in (0, 3) else plain
        for _ in range(LEFT_OUT):
            deliver()
        begun = time.perf_counter()
        for _ in range(block - LEFT_OUT):
            deliver()
        found.append((time.perf_counter() - begun) / (block - LEFT_OUT))
    run.measurement()  # fails if the loop and the workers were not of one mind about which batches are traced
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.tracing_switched")
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    parser.add_argument("--share", type=float, default=1.0, help="of the pairs, for a quick look")
    chosen = parser.parse_args()
    quiet = QuietTurns(chosen.lock)
    print("| | workers | pairs | plain batch | cost | 95 % interval | per batch |\n|---|---|---|---|---|---|---|")
    with quiet.turns():
        for name, workers, block, pairs in CASES:
            seconds = block_seconds(name, workers, block, max(8, round(pairs * chosen.share)))
            append(RAW, {"workload": name, "workers": workers, "block": block, "s_per_batch": seconds})
            print(row(name, workers, seconds), flush=True)
            quiet.next()


def row(name: str, workers: int, seconds: list[float]) -> str:
    """One line of the README's table."""
    first, second = seconds[::2], seconds[1::2]
    pairs = [(a, b) if i % 2 == 0 else (b, a) for i, (a, b) in enumerate(zip(first, second, strict=True))]
    cost = correlated_mean_interval([math.log(traced / plain) for traced, plain in pairs], 2)
    plain_us = statistics.median(plain for _, plain in pairs) * 1e6
    extra_us = statistics.median(traced - plain for traced, plain in pairs) * 1e6
    return (
        f"| `{name}` | {workers} | {len(pairs)} | {plain_us:.0f} us | {cost.value:+.2%} | {cost.low:+.2%} to {cost.high:+.2%} "
        f"| {extra_us:+.1f} us |"
    )


if __name__ == "__main__":
    main()
