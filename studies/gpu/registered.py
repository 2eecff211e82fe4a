"""Would batches that are born pinned pay? `python -m studies.gpu.registered [--device cpu]`, about ten seconds.

A batch of 64 x 3 x 224 x 224 float32 goes to the device in four ways, as AutoLoader's loop has it: a memfd that is mapped once
and that a worker has written again each time.

pageable      `batch.to(device, non_blocking=True)` from the mapped memory
pinned        `batch.pin_memory()` by one thread, as torch's pinning thread does it, then the copy
registered    CUDA alone: the memory is given to `cudaHostRegister` once; the copy is asynchronous

Milliseconds are the host's until the call returns, and until the device has the batch; medians of 50.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autotune_loader.autoloader.segments import Segment
from autotune_loader.pipeline.batches import accelerator
from studies.gpu.training import parsed, record, synchronize

SHAPE, QUICK = (64, 3, 224, 224), (4, 3, 128, 128)
SEGMENTS, TIMES = 4, 50


def batch_over(number: int, shape: tuple[int, ...]) -> tuple[Segment, torch.Tensor]:
    """A tensor over a segment, and the segment, which must live as long."""
    size = 4 * torch.Size(shape).numel()
    file = os.memfd_create("batch")
    os.ftruncate(file, size)
    segment = Segment(number, file, size)
    os.close(file)
    tensor = torch.frombuffer(segment.memory(lambda: None), dtype=torch.float32).view(shape)
    tensor.uniform_()
    return segment, tensor


def milliseconds(batches: list[torch.Tensor], send: Callable[[torch.Tensor], Any], wait: Callable[[], None]) -> Any:
    returned, arrived = list[float](), list[float]()
    for number in range(TIMES):
        wait()
        begun = time.perf_counter()
        kept = send(batches[number % len(batches)])
        returned.append(1e3 * (time.perf_counter() - begun))
        wait()
        arrived.append(1e3 * (time.perf_counter() - begun))
        del kept
    return {"returned_ms": round(statistics.median(returned), 3), "arrived_ms": round(statistics.median(arrived), 3)}


def first_blocks(batch: torch.Tensor) -> list[float]:
    """Milliseconds of pinning a batch, six times into memory of its own; the last one into memory that another has had."""
    took, held = [], []
    for number in range(7):
        begun = time.perf_counter()
        held.append(batch.pin_memory())
        took.append(round(1e3 * (time.perf_counter() - begun), 1))
        if number == 5:
            del held[:]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.registered", description=__doc__)
    chosen = parsed(parser)
    device = torch.device(chosen.device)
    held = [batch_over(number, QUICK if chosen.quick else SHAPE) for number in range(SEGMENTS)]
    batches, module, wait = [batch for _, batch in held], accelerator(device), partial(synchronize, device)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {"pageable": lambda batch: batch.to(device, non_blocking=True)}
    if module is not None:
        ways["pinned"] = lambda batch: batch.pin_memory().to(device, non_blocking=True)
        ways["only pinned"] = lambda batch: batch.pin_memory()
    torch.set_num_threads(1)
    if module is not None:
        record("registered", "the first blocks of pinned memory", ms=first_blocks(batches[0]))
    for name, send in ways.items():
        record("registered", name, **milliseconds(batches, send, wait))
    if not hasattr(module, "cudart"):
        return
    runtime = module.cudart()
    took = []
    for segment, _ in held:
        begun = time.perf_counter()
        status = runtime.cudaHostRegister(segment.address, segment.size, 0)
        took.append(1e3 * (time.perf_counter() - begun))
    record("registered", "cudaHostRegister", status=str(status), ms=took, is_pinned=batches[0].is_pinned())
    record("registered", "registered", **milliseconds(batches, ways["pageable"], wait))
    begun = time.perf_counter()
    for segment, _ in held:
        runtime.cudaHostUnregister(segment.address)
    record("registered", "cudaHostUnregister", ms=1e3 * (time.perf_counter() - begun) / SEGMENTS)


if __name__ == "__main__":
    main()
