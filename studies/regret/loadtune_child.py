"""One call of loadtune's own `tune()`, in loadtune's environment: `PYTHON -m studies.regret.loadtune_child WORKLOAD`.

Its Python API with its defaults (100 steps a trial, at most 6 trials, in the calling process), timed from call to result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.step import build_step
from studies.regret.bench import regret_workload


def loadtune_workload(name: str) -> Any:
    """The study's workload as loadtune wants it. It knows no sampler: it always shuffles."""
    from loadtune import Workload  # type: ignore[import-not-found]

    study = regret_workload(name)
    step: Any = None

    def train_step(model: Any, optimizer: Any, batch: Any, device: Any) -> float:
        nonlocal step
        if step is None:
            step = build_step(TrainingSide(model=study.model, train_step=study.train_step), batch)
        step.run(batch)
        return 0.0

    return Workload(
        name=name,
        make_dataset=lambda: study.dataset,
        make_model=lambda: study.model or torch.nn.Identity(),
        train_step=train_step,
        make_optimizer=lambda model: None,
        default_batch_size=study.batch_size,
    )


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from loadtune import tune  # type: ignore[import-not-found]

    workload = loadtune_workload(name)
    begun = time.perf_counter()
    result = tune(workload, verbose=False)
    seconds = time.perf_counter() - begun
    trials = [
        {"label": trial.knobs.label(), "samples_per_s": trial.throughput, "error": (trial.result or {}).get("error")}
        for trial in result.trials
    ]
    # A person keeps what they had where nothing was faster; loadtune's `best` does not count the baseline.
    better = result.best is not None and result.best.throughput > result.baseline.throughput
    knobs = result.best.knobs if better else None
    config = {
        "num_workers": knobs.num_workers if knobs else 0,
        "prefetch_factor": knobs.prefetch_factor if knobs else None,
        "persistent_workers": knobs.persistent_workers if knobs else False,
        "consumer_threads": knobs.num_threads if knobs else None,
    }
    detail = {"baseline": result.baseline.throughput, "trials": trials, "diagnosis": result.diagnosis}
    print(json.dumps({"config": config, "seconds": seconds, "detail": detail}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
