"""Finds the cheapest PyTorch DataLoader configuration that is as fast as anything this machine can do, and proves it.

    from autotune_loader import AutoLoader, tune, load_config

    loader = AutoLoader(dataset, batch_size=64, shuffle=True)       # a DataLoader that tunes itself while it trains

    result = tune(dataset, model, batch_size=64, output="loader.json")
    config = load_config("loader.json")
    loader = DataLoader(dataset, batch_size=64, shuffle=True, **config.to_kwargs())

Names are loaded when they are first used: reading a `loader.json` needs no torch, and `--help` should not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotune_loader.version import __version__

if TYPE_CHECKING:
    from autotune_loader.autoloader.loader import AutoLoader
    from autotune_loader.pipeline.prefetch import DevicePrefetcher
    from autotune_loader.report.comparison import Comparison
    from autotune_loader.results.load import load_config
    from autotune_loader.results.result import TuningResult
    from autotune_loader.scripts.enabling import enable
    from autotune_loader.tuning.compare import compare
    from autotune_loader.tuning.tune import tune
    from autotune_loader.values.config import LoaderConfig
    from autotune_loader.values.errors import TunerError

__all__ = [
    "AutoLoader",
    "Comparison",
    "DevicePrefetcher",
    "LoaderConfig",
    "TunerError",
    "TuningResult",
    "__version__",
    "compare",
    "enable",
    "load_config",
    "tune",
]

_HOMES = {
    "AutoLoader": "autoloader.loader",
    "Comparison": "report.comparison",
    "DevicePrefetcher": "pipeline.prefetch",
    "LoaderConfig": "values.config",
    "TunerError": "values.errors",
    "TuningResult": "results.result",
    "compare": "tuning.compare",
    "enable": "scripts.enabling",
    "load_config": "results.load",
    "load_ipython_extension": "integrations.ipython",
    "tune": "tuning.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
