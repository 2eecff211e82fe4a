"""One call of `tune()`, ours or loadtune's, in a fresh process.

The package is imported before the clock starts; the probe's own process is started by our call and counts.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from autotune_loader.values import LoaderConfig
from studies.processes import NoAnswerError, answer
from studies.regret import OURS, WITH_TPE
from studies.regret.bench import BenchError, regret_workload, step_of

BUDGET, DEADLINE_S = "60s", 150.0


def choice_in_child(who: str, workload: str, seed: int) -> tuple[LoaderConfig, float]:
    """What a process of its own chooses, and after how many seconds.

    Raises:
        BenchError: it failed, or did not answer in time.
    """
    if who == "loadtune" and importlib.util.find_spec("loadtune") is None:
        raise BenchError("it is not installed. Try pip install --no-deps loadtune==0.3.0.")
    choose = {OURS: ours, WITH_TPE: with_tpe, "loadtune": loadtune}[who]
    try:
        record = answer(choose, timeout_s=DEADLINE_S, name=workload, seed=seed)
    except NoAnswerError as error:
        raise BenchError(str(error)) from None
    return LoaderConfig.from_dict(record["config"]), record["seconds"]


def ours(name: str, seed: int, sampler: Any = None) -> dict[str, Any]:
    from autotune_loader import tune

    study = regret_workload(name)
    loader, begun = study.loader(), time.perf_counter()
    result = tune(loader, study.model, train_step=study.train_step, budget=BUDGET, sampler=sampler, progress=False)
    return {"config": result.best.to_dict(), "seconds": time.perf_counter() - begun}


def with_tpe(name: str, seed: int) -> dict[str, Any]:
    import optuna

    return ours(name, seed, optuna.samplers.TPESampler(seed=seed))


def loadtune(name: str, seed: int) -> dict[str, Any]:
    """Its Python API with its defaults: 100 steps a trial, at most 6 trials, in the calling process, always shuffled."""
    from loadtune import Workload, tune  # type: ignore[import-not-found]

    study = regret_workload(name)
    steps: list[Any] = []

    def train_step(model: Any, optimizer: Any, batch: Any, device: Any) -> float:
        if not steps:
            steps.append(step_of(study, batch))
        steps[0].run(batch)
        return 0.0

    workload = Workload(
        name=name,
        make_dataset=lambda: study.dataset,
        make_model=lambda: study.model,
        train_step=train_step,
        make_optimizer=lambda model: None,
        default_batch_size=study.batch_size,
    )
    begun = time.perf_counter()
    result = tune(workload, verbose=False)
    seconds = time.perf_counter() - begun
    # A person keeps what they had where nothing was faster; loadtune's `best` does not count the baseline.
    better = result.best is not None and result.best.throughput > result.baseline.throughput
    names = ("num_workers", "prefetch_factor", "persistent_workers")
    config = {each: getattr(result.best.knobs, each) for each in names} if better else {}
    return {"config": config, "seconds": seconds}
