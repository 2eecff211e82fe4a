"""The strategies that look for a configuration, by what a person would do; on simulated machines and on real jobs alike.

| strategy | how |
|---|---|
| torch default, workers = cores | nothing is measured, 0 seconds |
| plain rule | one look of 1.5 s at 2 workers, then arithmetic (`search/rule.py`) |
| tpe, random | Optuna over workers and prefetch, the fastest trial: no rounds, as `study.optimize()` has none |
| grid | every number of workers x prefetch (as DPT does), in an order that is drawn |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna

from autotune_loader.search.rule import plain_rule
from autotune_loader.search.sampler import quiet_optuna
from autotune_loader.values import BurstPlan, LoaderConfig

PREFETCH_FACTORS = (2, 4, 8)
LOOK_WORKERS = 2
LOOK = BurstPlan(max_s=1.5, min_s=1.5, relative_error=0.0)
"""The plain rule looks at training for so long, with so many workers."""


Field = Any
"""Where a strategy looks: `cores`, `counts` of workers to choose from, how many `trials` a sampler has (None is as many as
there are seconds), the `rate()` of a configuration in a short run, 0 of what fails, `look()`, a burst of `LOOK` with the times
of its stages or None, and whether the strategy has had its seconds (`is_over()`)."""
Strategy = Callable[[Field, int], LoaderConfig]
"""Of a field and a seed."""


def plain(field: Field, seed: int) -> LoaderConfig:
    seen = field.look()
    if seen is None:
        return LoaderConfig()
    stages = {"fetch_s": seen.service_s, "fetch_cpu_s": seen.service_cpu_s, "step_s": seen.step_s}
    return plain_rule(cores=field.cores, max_workers=max(field.counts), **stages)


def by_sampler(make: Callable[[int, dict[str, list[Any]]], optuna.samplers.BaseSampler], *, ends: bool) -> Strategy:
    """A sampler of Optuna's; one that `ends` by itself has as many trials as it wants."""

    def choose(field: Field, seed: int) -> LoaderConfig:
        axes: dict[str, list[Any]] = {"workers": list(range(len(field.counts))), "prefetch": list(PREFETCH_FACTORS)}

        def config(values: dict[str, Any]) -> LoaderConfig:
            return LoaderConfig().with_workers(field.counts[values["workers"]], values["prefetch"])

        def objective(trial: optuna.Trial) -> float:
            trial.suggest_int("workers", 0, axes["workers"][-1])
            trial.suggest_categorical("prefetch", PREFETCH_FACTORS)
            rate = field.rate(config(trial.params))
            if field.is_over():
                study.stop()
            return rate

        with quiet_optuna():
            study = optuna.create_study(direction="maximize", sampler=make(seed, axes))
            study.optimize(objective, n_trials=None if ends else field.trials)
        return config(study.best_params)

    return choose


STRATEGIES: dict[str, Strategy] = {
    "torch default": lambda field, seed: LoaderConfig(),
    "workers = cores": lambda field, seed: LoaderConfig(num_workers=field.cores),
    "plain rule": plain,
    "random": by_sampler(lambda seed, axes: optuna.samplers.RandomSampler(seed=seed), ends=False),
    "tpe": by_sampler(lambda seed, axes: optuna.samplers.TPESampler(seed=seed), ends=False),
    "grid": by_sampler(lambda seed, axes: optuna.samplers.GridSampler(axes, seed=seed), ends=True),
}
