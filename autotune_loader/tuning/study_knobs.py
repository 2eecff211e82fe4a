"""Where a configuration lies on Optuna's scales, and which configuration a point of them is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune_loader.decision.space import MAX_WORKERS, Space
from autotune_loader.values.config import LoaderConfig

if TYPE_CHECKING:
    import optuna

# Bounds of the integer knobs: wide and fixed, because Optuna refuses to resume a study whose bounds moved.
MOST_PREFETCH, MOST_THREADS = 64, 1024
# Axes that mean nothing without workers.
ONLY_WITH_WORKERS = ("in_order", "multiprocessing_context")


class Knobs:
    """Configurations as points on Optuna's scales, and back.

    Args:
        space: what may be proposed.
        default_threads: what `consumer_threads=None` means here, so that it has a place on the scale.
    """

    def __init__(self, space: Space, default_threads: int) -> None:
        self._space = space
        self._default_threads = default_threads

    def of(self, config: LoaderConfig) -> dict[str, Any]:
        """Where a configuration lies on Optuna's scales. Beyond their ends is at their ends: `record` has the truth."""
        knobs: dict[str, Any] = {"num_workers": min(config.num_workers, MAX_WORKERS)}
        if config.prefetch_factor is not None:
            knobs["prefetch_factor"] = min(config.prefetch_factor, MOST_PREFETCH)
        for name, values in self._searched().items():
            value = getattr(config, name)
            if name in ONLY_WITH_WORKERS and not config.num_workers:
                continue
            if name == "consumer_threads":
                knobs[name] = min(value or self._default_threads, MOST_THREADS)
            elif value in values:
                knobs[name] = value
        return knobs

    def _searched(self) -> dict[str, list[Any]]:
        """The categorical knobs that have more than one value here."""
        axes: dict[str, tuple[Any, ...]] = {
            "pin_memory": self._space.pin_memory,
            "device_prefetch": self._space.device_prefetch,
            "in_order": self._space.in_order,
            "multiprocessing_context": self._space.multiprocessing_contexts,
            "sharing_strategy": self._space.sharing_strategies,
            "batch_size": self._space.batch_sizes,
            "drop_last": self._space.drop_lasts,
            "consumer_threads": self._space.consumer_threads,
        }
        return {name: list(values) for name, values in axes.items() if len(values) > 1}

    def suggest(self, trial: optuna.trial.Trial) -> LoaderConfig:
        workers = trial.suggest_int("num_workers", 0, MAX_WORKERS)
        values: dict[str, Any] = {"num_workers": min(workers, self._space.max_workers)}
        if workers:
            prefetch = trial.suggest_int("prefetch_factor", 1, MOST_PREFETCH, log=True)
            values["prefetch_factor"] = min(self._space.prefetch_factors, key=lambda legal: abs(legal - prefetch))
            values["persistent_workers"] = self._space.persistent_workers
        for name, choices in self._searched().items():
            if name == "consumer_threads":
                threads = trial.suggest_int(name, 1, MOST_THREADS, log=True)
                legal = {count or self._default_threads: count for count in choices}
                values[name] = legal[min(legal, key=lambda count: abs(count - threads))]
            elif name not in ONLY_WITH_WORKERS or workers:
                values[name] = trial.suggest_categorical(name, choices)
        if values["num_workers"] == 0:
            values = {k: v for k, v in values.items() if k not in ("prefetch_factor", "persistent_workers")}
        return LoaderConfig(**{"drop_last": self._space.drop_lasts[0], **values})

    def distribution(self, name: str) -> optuna.distributions.BaseDistribution:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if name == "num_workers":
            return IntDistribution(0, MAX_WORKERS)
        if name == "prefetch_factor":
            return IntDistribution(1, MOST_PREFETCH, log=True)
        if name == "consumer_threads":
            return IntDistribution(1, MOST_THREADS, log=True)
        return CategoricalDistribution(self._searched()[name])
