"""What do people get with a GPU: AutoLoader beside DataLoader, AutoLoader from nothing, and what `watch` names?

    python -m studies gpu.uses [--only images] [--device sim --quick]

images   AutoLoader and DataLoader with as many workers on image batches; pinned where they lie, and by torch's thread
live     AutoLoader on resnet_jpeg: rate of each eight seconds, and of the best fixed configuration beside it
watch    is the wait that `autotune-loader watch` names the device's, whatever the host waits for?
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune_loader import AutoLoader, LoaderConfig, TuningResult
from autotune_loader.autoloader import iterator
from autotune_loader.pipeline.batches import accelerator
from studies.gpu.jobs import FULL, JOBS, QUICK, Size
from studies.gpu.training import Loop, Rate, attempted, configured, in_turns, medians, recorded, synchronize
from studies.study import Row, Table, record
from studies.workloads import Items

BAR = "the share of waiting that watch names is within 0.1 of the device's; the others have none"
WAITS_S, MOST_APART = {"ahead": 0.02, "behind": 0.08}, 0.1
"""Of a worker for a batch, where two workers are ahead of a step of 20 ms and behind it; and the bar of `watch`."""


def images(device: str, size: Size, seconds: float) -> Table:
    """Rates in turns, with the settings that people write."""
    loop, cores = Loop(JOBS["images"](size), device, seconds / 6), os.cpu_count() or 1
    few, many = (LoaderConfig(num_workers=n, pin_memory=device != "cpu") for n in (max(1, cores // 2), cores))

    def by_thread() -> Rate:
        own, iterator.pinner_for = iterator.pinner_for, lambda loader: None
        try:
            return loop.live(few)
        finally:
            iterator.pinner_for = own

    sides = {f"DataLoader, {each}": partial(loop.train, each) for each in (few, many)}
    sides |= {f"AutoLoader, {each}": partial(loop.live, each) for each in (few, many)}
    sides[f"AutoLoader, {few}, by torch's thread"] = by_thread
    recorded("images", "the step alone", loop.step())
    found = medians(in_turns("images", sides, 3))
    best = max(rate for side, rate in found.items() if side.startswith("DataLoader"))
    for side, its in found.items():
        yield Row({"what": f"images: {side}", "samples/s": its, "over the faster DataLoader": its / best})


def live(device: str, size: Size, seconds: float) -> Table:
    """Share of the best fixed configuration, which runs before and after it."""
    loop, cores = Loop(JOBS["resnet_jpeg"](size), device, seconds), os.cpu_count() or 1
    fixed = [LoaderConfig(num_workers=n, pin_memory=device != "cpu") for n in (max(1, cores // 2), cores)]
    loader = AutoLoader(loop.job.dataset, pin_memory=device != "cpu", **loop.job.parts())
    before = [loop.train(config).samples_per_s for config in fixed]
    nothing_ahead, rates = LoaderConfig(), list[float]()
    for _ in range(3 if size is QUICK else 5):
        rates.append(loop.timed(loader, nothing_ahead).samples_per_s)
        record("resnet_jpeg", "live", samples_per_s=rates[-1], num_workers=loader.num_workers)
    after = [loop.train(config).samples_per_s for config in fixed]
    best = max((first + second) / 2 for first, second in zip(before, after, strict=True))
    record("resnet_jpeg", "live", says=loader.report())
    yield Row({"what": "live", "samples/s": rates[-1], "best fixed": best, "of it": rates[-1] / best})


def watch(device: str, size: Size, seconds: float) -> Table:
    """Run `watched` as a script of somebody's under it, with a loader that is ahead of the step and with one behind it."""
    if accelerator(device) is None:
        yield "watch: a CPU has no clock but the host's"
        return
    for name, wait_s in WAITS_S.items():
        with tempfile.TemporaryDirectory() as folder:
            script, output = Path(folder, "train.py"), Path(folder, "loader.json")
            given = f"{device!r}, {size is QUICK}, {3 + seconds}, {wait_s}"
            script.write_text(f"from studies.gpu import uses\n\nprint(uses.watched({given}))\n")
            command = [sys.executable, "-W", "ignore", "-m", "autotune_loader", "watch", "-o", str(output), str(script)]
            done = subprocess.run(command, text=True, capture_output=True, timeout=110, check=False)
            print(done.stdout + done.stderr, flush=True)
            if done.returncode:
                raise RuntimeError(f"watch ended with {done.returncode}")
            named = TuningResult.load(output).wait_share or 0.0
        device_idle, host_waits = map(float, done.stdout.splitlines()[0].split())
        cells = {"what": f"watch, {name}", "named": named, "device idle": device_idle, "host waits": host_waits}
        yield Row(cells, abs(named - device_idle) <= MOST_APART)


def watched(device: str, is_quick: bool, seconds: float, wait_s: float) -> str:
    """Train without ever waiting for the device; the shares in which it was idle, by its own events, and the host waited."""
    size = QUICK if is_quick else FULL
    job = JOBS["transformer"](size)
    tokens = [job.dataset[index] for index in range(64)]
    data = Items(lambda index: time.sleep(wait_s / size.batch) or tokens[index % 64], 65536)
    model, module = job.model.to(device), accelerator(device)
    optimizer, events = torch.optim.SGD(model.parameters(), lr=0.01), list[Any]()
    begun, waited_s, asked = time.perf_counter(), 0.0, time.perf_counter()
    for batch in replace(job, dataset=data).loader(num_workers=2, pin_memory=True):
        got = time.perf_counter()
        waited_s += got - asked
        events.append(module.Event(enable_timing=True))
        events[-1].record()
        optimizer.zero_grad()
        job.train_step(model, batch).backward()
        optimizer.step()
        events.append(module.Event(enable_timing=True))
        events[-1].record()
        asked = time.perf_counter()
        if asked - begun > seconds:
            break
    synchronize(torch.device(device))
    busy_ms = sum(start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=True))
    return f"{1 - busy_ms / events[0].elapsed_time(events[-1])} {waited_s / (asked - begun)}"


def rows(*, only: str = "", device: str = "cuda", quick: bool = False) -> Table:
    warnings.simplefilter("ignore")
    size, seconds = (QUICK, 0.5) if quick else (FULL, 8.0)
    for use in (images, live, watch):
        if only in use.__name__:
            yield from attempted(use.__name__, partial(use, configured(device), size, seconds))
