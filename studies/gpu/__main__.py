"""`python -m studies.gpu`: does tuning reach what the GPU and the loader allow? One table, one JSON file.

    python -m studies.gpu                              # a GPU, about two minutes a job
    python -m studies.gpu --only transformer --budget 20
    python -m studies.gpu --device cpu --quick         # the same code in small, where there is no GPU: a smoke test

Files go to `$OUT` where that is set, else to `studies/gpu/results`; they are written after every job, so a run that is cut
off keeps what it has. Figures of `--quick` say that the code runs, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from autotune_loader.machine.facts import Machine, inspect_machine
from studies.gpu.jobs import FULL, QUICK
from studies.gpu.study import Effort, Findings, as_plain, study

JOBS_BY_WORTH = ("resnet_jpeg", "transformer", "large_batches", "resnet_compute")
QUICK_EFFORT = Effort(budget_s=4.0, survey_s=0.2, rounds=2, workers=(0, 2))
RESULTS = Path(__file__).parent / "results"
# Goals of the issue.
OF_LIMIT_GOAL, VERDICT_GOAL_S = 0.95, 3.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="such as cuda:1; cpu only makes sense with --quick")
    parser.add_argument("--only", default=",".join(JOBS_BY_WORTH), help="jobs, by commas")
    parser.add_argument("--quick", action="store_true", help="tiny jobs, for a test of the code")
    parser.add_argument("--budget", type=float, help="seconds of each tuning run")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    chosen = parser.parse_args(arguments)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(2, "there is no CUDA device here; --device cpu --quick runs the same code in small\n")
    effort = QUICK_EFFORT if chosen.quick else Effort()
    effort = effort if chosen.budget is None else Effort(budget_s=chosen.budget)
    torch.backends.cudnn.benchmark = True
    if chosen.quick:
        torch.set_num_threads(1)  # more only wait for one another on a busy machine
    found: list[Findings] = []
    for name in chosen.only.split(","):
        begun = time.monotonic()
        found.append(study(name, QUICK if chosen.quick else FULL, chosen.device, effort))
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        save(found, chosen.device, chosen.quick, chosen.out)
    print(table(found))


def save(found: list[Findings], device: str, quick: bool, folder: Path) -> None:
    """`gpu.json` and `gpu.md`: what was found so far, and where."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {**machine_facts(device), "quick": quick}
    document = {"machine": where, "jobs": [as_plain(each) for each in found]}
    (folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    facts = ", ".join(f"{name} {value}" for name, value in where.items())
    (folder / "gpu.md").write_text(f"# Tuned jobs on a device\n\n{facts}\n\n{table(found)}\n")


def machine_facts(device: str) -> dict[str, Any]:
    """What the figures depend on; named as in studies/README.md, never by a host's name."""
    machine = inspect_machine()
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return {
        "name": f"{machine.usable_cores}c-{_gib(machine)}g-{name.lower().replace(' ', '-')}",
        "driver": machine.driver or "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _gib(machine: Machine) -> int:
    return round((machine.memory.total_bytes or 0) / 2**30)


def table(found: list[Findings]) -> str:
    """The findings as Markdown, goals beside the figures."""
    head = [
        "job",
        "binds",
        "verdict",
        "default /s",
        "tuned /s",
        f"of the smaller limit (goal {OF_LIMIT_GOAL:.0%} where the loader binds)",
        "regret against the grid",
        "GPU busy before, after",
        "a tuned burst's working share by events, by NVML (goal 3 points apart)",
        "DevicePrefetcher over pinned copies",
        "twin's error, median and worst",
        f"verdict after (goal {VERDICT_GOAL_S:g} s where the step binds)",
        "tuned with",
    ]
    rows = [head, ["---"] * len(head), *(_row(each) for each in found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(found: Findings) -> list[str]:
    bound = "step binds" if found.said_compute_bound else "step does not bind"
    return [
        found.job,
        found.binds,
        found.verdict,
        f"{found.default_per_s:,.1f}",
        f"{found.tuned_per_s:,.1f} ({found.tuned_per_s / found.default_per_s:.2f}x)",
        f"{found.of_limit:.1%} of {min(found.step_limit_per_s, found.loader_limit_per_s):,.1f}",
        f"{found.regret:.1%} ({found.regret_low:.1%} to {found.regret_high:.1%})",
        f"{_share(found.default_util)}, {_share(found.tuned_util)}"
        + (f" ({found.util_reason})" if found.util_reason else ""),
        f"{_share(found.burst_busy_share)}, {_share(found.burst_util)}",
        "-"
        if found.prefetcher is None
        else f"{found.prefetcher:.2f}x ({found.prefetcher_low:.2f} to {found.prefetcher_high:.2f})",
        f"{_share(found.twin_median_error)}, {_share(found.twin_worst_error)}",
        f"{found.verdict_s:.1f} s + {found.startup_s:.1f} s of start-up: {bound}",
        f"{found.best}, in {found.tune_s:.0f} s and {found.trials} trials"
        + (f", {len(found.failures)} failed" if found.failures else ""),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    main()
