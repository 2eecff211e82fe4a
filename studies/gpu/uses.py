"""What people do with a GPU: `python -m studies.gpu.uses live|watch|compare ... [--device cpu --quick]`

live        AutoLoader on resnet_jpeg: rate of each ten seconds, and of the best fixed configuration beside it
watch       `autotune-loader watch` on a plain script that trains on the device
compare     `compare()` of a plain and of a compiled model
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader, LoaderConfig
from studies.gpu.__main__ import check_device, record
from studies.gpu.jobs import FULL, JOBS, QUICK, Job
from studies.gpu.training import Loop

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
    for pictures, labels in loader:
        loss = job.train_step(model, (pictures.to(device), labels.to(device)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() - begun > seconds:
            break
"""


class Use:
    """The job that all of them share, in full or in small."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.size = QUICK if quick else FULL

    def job(self, name: str = "resnet_jpeg") -> Job:
        return JOBS[name](self.size)

    def live(self) -> None:
        """Share of the best fixed configuration, which runs before and after it."""
        loop = Loop(self.job(), self.device, 0.5 if self.quick else 10.0)
        cores = os.cpu_count() or 1
        fixed = [LoaderConfig(num_workers=n, pin_memory=self.device != "cpu") for n in (max(1, cores // 2), cores)]
        loader = AutoLoader(loop.job.dataset, **loop.job.parts())
        before = [loop.train(config).samples_per_s for config in fixed]
        rates = [loop.timed(loader, depth=1).samples_per_s for _ in range(2 if self.quick else 7)]
        after = [loop.train(config).samples_per_s for config in fixed]
        best = max((first + second) / 2 for first, second in zip(before, after, strict=True))
        record(
            "resnet_jpeg", "live", of_best_fixed=rates[-1] / best, best_fixed=best, rates=rates, says=loader.report()
        )

    def watch(self) -> None:
        """What `watch` says of the script is printed as it is."""
        root = Path(__file__).parents[2]
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(SCRIPT)
            size = repr({name: getattr(self.size, name) for name in self.size.__dataclass_fields__})
            arguments = [self.device, "4" if self.quick else "30", size]
            command = [sys.executable, "-W", "ignore", "-m", "autotune_loader", "watch", str(script), *arguments]
            environ = {**os.environ, "PYTHONPATH": str(root)}
            done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=110, check=False)
        print(done.stdout + done.stderr, flush=True)
        record("resnet_jpeg", "watch", status=done.returncode)
        if done.returncode:
            raise RuntimeError(f"watch ended with {done.returncode}")

    def compare(self) -> None:
        from autotune_loader import compare

        job = self.job("transformer")
        loader = DataLoader(job.dataset, **job.parts())
        model = job.model.to(self.device)
        found = compare(
            {"plain": (loader, job.train_step), "compiled": (loader, Compiled(job.train_step))},
            model,
            device=self.device,
        )
        print(found, flush=True)
        record("transformer", "compare", says=str(found))


class Compiled:
    """The same step of the model, compiled at its first call."""

    def __init__(self, step: Callable[[Any, Any], torch.Tensor]) -> None:
        self.step, self.model = step, None

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.model = self.model or torch.compile(model)
        return self.step(self.model, batch)


USES = ("live", "watch", "compare")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.uses", description=__doc__)
    parser.add_argument("uses", nargs="*", choices=[*USES, []], help="which; all without one")
    parser.add_argument("--device", default="cuda", help="such as cuda:1; cpu only makes sense with --quick")
    parser.add_argument("--quick", action="store_true", help="in small, for a test of the code")
    chosen = parser.parse_args(arguments)
    check_device(parser, chosen.device)
    warnings.simplefilter("ignore")
    failed = 0
    for name in chosen.uses or USES:
        try:
            getattr(Use(chosen.device, chosen.quick), name)()
        except Exception:  # what follows is worth its time on a machine that is lent for minutes
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
