"""Finds the PyTorch DataLoader settings that keep a training loop fed, and measures the speedup.

    from autotune_loader import AutoLoader, load_config, tune

    loader = AutoLoader(dataset, batch_size=64, shuffle=True)       # a DataLoader that tunes itself during training

    result = tune(DataLoader(dataset, batch_size=64, shuffle=True), model, output="loader.json")
    loader = result.apply_to(loader)                                # your loader with the settings that were measured
    loader = DataLoader(dataset, batch_size=64, shuffle=True, **load_config("loader.json").to_kwargs())

Names are loaded when they are first used: reading a `loader.json` needs no torch, and `--help` should not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotune_loader.version import __version__

if TYPE_CHECKING:
    from autotune_loader.autoloader.live import Found
    from autotune_loader.autoloader.loader import AutoLoader
    from autotune_loader.pipeline.batches import DevicePrefetcher
    from autotune_loader.report.script import ScriptReport
    from autotune_loader.results.comparison import Comparison
    from autotune_loader.results.file import load_config
    from autotune_loader.results.result import Finding, TuningResult
    from autotune_loader.search.belief import Prediction
    from autotune_loader.search.sampler import TwinSampler
    from autotune_loader.tuning.compare import compare
    from autotune_loader.tuning.tune import tune
    from autotune_loader.values import (
        ConfigFileError,
        Interval,
        LoaderConfig,
        MachineMismatchError,
        MissingExtraError,
        PlatformError,
        TunerError,
        WorkloadError,
    )
    from autotune_loader.watch.hook import Hook, enable

__all__ = [
    "AutoLoader",
    "Comparison",
    "ConfigFileError",
    "DevicePrefetcher",
    "Finding",
    "Found",
    "Hook",
    "Interval",
    "LoaderConfig",
    "MachineMismatchError",
    "MissingExtraError",
    "PlatformError",
    "Prediction",
    "ScriptReport",
    "TunerError",
    "TuningResult",
    "TwinSampler",
    "WorkloadError",
    "__version__",
    "compare",
    "enable",
    "load_config",
    "tune",
]

_HOMES = {
    "AutoLoader": "autoloader.loader",
    "Comparison": "results.comparison",
    "ConfigFileError": "values.errors",
    "DevicePrefetcher": "pipeline.batches",
    "Finding": "results.result",
    "Found": "autoloader.live",
    "Hook": "watch.hook",
    "Interval": "values.statistics",
    "LoaderConfig": "values.config",
    "MachineMismatchError": "values.errors",
    "MissingExtraError": "values.errors",
    "PlatformError": "values.errors",
    "Prediction": "search.belief",
    "ScriptReport": "report.script",
    "TunerError": "values.errors",
    "TuningResult": "results.result",
    "TwinSampler": "search.sampler",
    "WorkloadError": "values.errors",
    "compare": "tuning.compare",
    "enable": "watch.hook",
    "load_config": "results.file",
    "load_ipython_extension": "integrations.ipython",
    "tune": "tuning.tune",
}
FOR_TUNING = ("optuna", "msgspec", "cloudpickle")
"""What only `tune()` and `compare()` need."""


if not TYPE_CHECKING:  # which would take any name for one that can be imported

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
        try:
            home = import_module(f"{__name__}.{_HOMES[name]}")
        except ModuleNotFoundError as error:
            from autotune_loader.values import MissingExtraError

            raise MissingExtraError(name, *(FOR_TUNING if error.name in FOR_TUNING else [str(error.name)])) from error
        value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
