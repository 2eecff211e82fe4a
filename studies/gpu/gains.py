"""`python -m studies.gpu.gains`: what `allow=("amp", "compile")` promises of a step, against what training then gains.

    promised    by the probe, on a batch that lies on the device
    measured    plain training in float32 with the same loader, without and with the change, in turns

Only jobs whose step binds are run: elsewhere nothing is promised.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import LoaderConfig
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.experiments import DEADLINE_S, KINDS, ROUNDS_S
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Round, paired_ratio
from autotune_loader.values.trial import AccelerationKind
from studies.gpu.jobs import FULL, JOBS, QUICK, Job, Size
from studies.gpu.study import record
from studies.gpu.training import Loop

WORKERS = 4
ROUNDS = 5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.gains", description=__doc__)
    parser.add_argument("--device", default="cuda", help="such as cuda:1; cpu only makes sense with --quick")
    parser.add_argument("--only", default="transformer,resnet_compute", help="jobs, by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="amp, compile")
    parser.add_argument("--quick", action="store_true", help="tiny jobs, for a test of the code")
    chosen = parser.parse_args(arguments)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device here; --device cpu --quick --kinds amp runs the same code in small\n")
    size, seconds, rounds = (QUICK, 0.2, 2) if chosen.quick else (FULL, 2.0, ROUNDS)
    for name in chosen.only.split(","):
        job = _in_float32(JOBS[name](size))
        for kind in (kind for kind in KINDS if kind in chosen.kinds.split(",")):
            promised = _promised(kind, job, chosen.device)
            measured = _measured(kind, name, size, chosen.device, seconds, rounds) if "speedup" in promised else {}
            record(name, kind, promised=promised, measured=measured)


def _in_float32(job: Job) -> Job:
    return replace(job, train_step=type(job.train_step)(in_half=False))


def _promised(kind: AccelerationKind, job: Job, device: str) -> dict[str, Any]:
    loader: DataLoader[Any] = DataLoader(job.dataset, **job.parts())
    workload, _ = make_workload(loader, job.model, train_step=job.train_step, device=device)
    with open_probe(workload, inspect_machine(), "process", None) as opened:
        found = opened.probe.acceleration(kind, None, BurstPlan(max_s=ROUNDS_S, deadline_s=DEADLINE_S[kind]))
    if isinstance(found, Failure) or found.speedup is None:
        return {"reason": found.message if isinstance(found, Failure) else found.note}
    speedup = found.speedup
    return {"speedup": speedup.value, "low": speedup.low, "high": speedup.high, "is_same_loss": found.is_same_loss}


def _measured(
    kind: AccelerationKind, name: str, size: Size, device: str, seconds: float, rounds: int
) -> dict[str, float]:
    """Plain training with one loader and two steps, in turns; a warm-up run of each comes first."""
    plain = Loop(_in_float32(JOBS[name](size)), device, seconds)
    changed = Loop(JOBS[name](size) if kind == "amp" else _in_float32(JOBS[name](size)), device, seconds)
    if kind == "compile":
        changed.model = torch.compile(changed.model)
    config = LoaderConfig(num_workers=min(WORKERS, os.cpu_count() or 1), pin_memory=plain.device.type == "cuda")
    loops = {"plain": plain, "changed": changed}
    for loop in loops.values():
        loop.step()
    turns = [Round(rates={key: loop.train(config).samples_per_s for key, loop in loops.items()}) for _ in range(rounds)]
    ratio = paired_ratio(turns, "changed", "plain")
    return {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}


if __name__ == "__main__":
    main()
