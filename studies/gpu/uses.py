"""What people do with a GPU: `python -m studies.gpu.uses [NAME ...] [--device sim --quick]`

images          AutoLoader and DataLoader with as many workers on image batches; pinned where they lie, and by torch's thread
live            AutoLoader on resnet_jpeg: rate of each eight seconds, and of the best fixed configuration beside it
hugging_face, lightning     see `studies.gpu.trainers`
compare         `compare()` of a plain and of a compiled model
watch           `autotune-loader watch` on a plain script that trains on the device
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from autotune_loader import AutoLoader, LoaderConfig
from autotune_loader.autoloader import elastic
from studies.gpu.__main__ import check_device
from studies.gpu.jobs import FULL, JOBS, QUICK, Size
from studies.gpu.trainers import hugging_face, lightning
from studies.gpu.training import Loop, Rate, in_turns, medians, record, recorded

SCRIPT = """
import sys
import time

import torch
from torch.utils.data import DataLoader

from studies.gpu.jobs import JOBS, Size

device, seconds = sys.argv[1], float(sys.argv[2])
job = JOBS["resnet_jpeg"](Size(**eval(sys.argv[3])))
loader = DataLoader(job.dataset, batch_size=job.batch_size, shuffle=True, num_workers=2)
model = job.model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begun = time.monotonic()
while time.monotonic() - begun < seconds:
    for batch in loader:
        loss = job.train_step(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() - begun > seconds:
            break
"""


def images(device: str, size: Size, seconds: float) -> None:
    """Rates in turns, with the settings that people write."""
    loop, cores = Loop(JOBS["images"](size), device, seconds / 6), os.cpu_count() or 1
    few, many = (LoaderConfig(num_workers=n, pin_memory=device != "cpu") for n in (max(1, cores // 2), cores))

    def by_thread() -> Rate:
        own, elastic.pinner_for = elastic.pinner_for, lambda loader: None
        try:
            return loop.live(few)
        finally:
            elastic.pinner_for = own

    sides = {f"DataLoader, {each}": partial(loop.train, each) for each in (few, many)}
    sides |= {f"AutoLoader, {each}": partial(loop.live, each) for each in (few, many)}
    sides[f"AutoLoader, {few}, by torch's thread"] = by_thread
    recorded("images", "the step alone", loop.step())
    found = medians(in_turns("images", sides, 3))
    best = max(rate for side, rate in found.items() if side.startswith("DataLoader"))
    record("images", "over the faster DataLoader", **{side: rate / best for side, rate in found.items()})


def live(device: str, size: Size, seconds: float) -> None:
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
    record("resnet_jpeg", "live", of_best_fixed=rates[-1] / best, best_fixed=best, rates=rates, says=loader.report())


def watch(device: str, size: Size, seconds: float) -> None:
    """What `watch` says of the script is printed as it is."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        command = [sys.executable, "-W", "ignore", "-m", "autotune_loader", "watch", str(script)]
        command += [device, str(3 * seconds), repr(asdict(size))]
        installed = filter(None, [os.environ.get("PYTHONPATH")])  # of .whl
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *installed])}
        done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=110, check=False)
    print(done.stdout + done.stderr, flush=True)
    record("resnet_jpeg", "watch", status=done.returncode)
    if done.returncode:
        raise RuntimeError(f"watch ended with {done.returncode}")


def compare(device: str, size: Size, seconds: float) -> None:
    from autotune_loader import compare as compare_sides

    job = JOBS["transformer"](size)
    loader, model = job.loader(), job.model.to(device)
    backend = "eager" if size is QUICK else "inductor"  # which knows no simulated accelerator
    models = {"plain": model, "compiled": torch.compile(model, backend=backend)}
    sides = {name: (loader, each, job.train_step) for name, each in models.items()}
    found = compare_sides(sides, device=device, budget=15.0 if seconds > 1 else 4.0)
    print(found.report(), flush=True)
    record("transformer", "compare", says=str(found))


USES = {each.__name__: each for each in (images, live, hugging_face, lightning, compare, watch)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.uses", description=__doc__)
    parser.add_argument("uses", nargs="*", choices=[*USES, []], help="which; all without one")
    parser.add_argument("--device", default="cuda", help="such as cuda:1; cpu and sim with --quick")
    parser.add_argument("--quick", action="store_true", help="in small, for a test of the code")
    chosen = parser.parse_args(arguments)
    check_device(parser, chosen.device)
    warnings.simplefilter("ignore")
    failed = 0
    for name in chosen.uses or USES:
        device = chosen.device
        if name in ("hugging_face", "lightning") and device.startswith("sim"):
            print(f"{name} does not know {device}: on the CPU", flush=True)
            device = "cpu"
        try:
            USES[name](device, QUICK if chosen.quick else FULL, 0.5 if chosen.quick else 8.0)
        except Exception:  # what follows is worth its time on a machine that is lent for minutes
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
