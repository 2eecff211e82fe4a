"""One call of `tune()`, ours or loadtune's, in a fresh process: `python -m studies.regret.child ours|loadtune WORKLOAD SEED`.

The package is imported before the clock starts; the probe's own process is started by our call and counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from studies.regret.bench import regret_workload

BUDGET = "60s"


def ours(name: str, seed: int) -> dict[str, Any]:
    from autotune_loader import tune

    arguments = regret_workload(name).to_tune_kwargs()
    begun = time.perf_counter()
    result = tune(**arguments, budget=BUDGET, progress=False)
    return {"config": result.best.to_dict(), "seconds": time.perf_counter() - begun, "detail": str(result)}


def loadtune(name: str, seed: int) -> dict[str, Any]:
    """Its Python API with its defaults: 100 steps a trial, at most 6 trials, in the calling process, always shuffled."""
    import torch
    from loadtune import Workload, tune  # type: ignore[import-not-found]

    from autotune_loader.bursts.step import build_step
    from autotune_loader.pipeline.workload import TrainingSide

    study = regret_workload(name)
    steps: list[Any] = []

    def train_step(model: Any, optimizer: Any, batch: Any, device: Any) -> float:
        if not steps:
            steps.append(build_step(TrainingSide(model=study.model, train_step=study.train_step), batch))
        steps[0].run(batch)
        return 0.0

    workload = Workload(
        name=name,
        make_dataset=lambda: study.dataset,
        make_model=lambda: study.model or torch.nn.Identity(),
        train_step=train_step,
        make_optimizer=lambda model: None,
        default_batch_size=study.batch_size,
    )
    begun = time.perf_counter()
    result = tune(workload, verbose=False)
    seconds = time.perf_counter() - begun
    # A person keeps what they had where nothing was faster; loadtune's `best` does not count the baseline.
    better = result.best is not None and result.best.throughput > result.baseline.throughput
    knobs = result.best.knobs if better else None
    config = {
        "num_workers": knobs.num_workers if knobs else 0,
        "prefetch_factor": knobs.prefetch_factor if knobs else None,
        "persistent_workers": knobs.persistent_workers if knobs else False,
    }
    return {"config": config, "seconds": seconds, "detail": result.diagnosis}


def main(who: str, name: str, seed: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a dataset prints is no answer
    print(json.dumps({"ours": ours, "loadtune": loadtune}[who](name, int(seed))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
