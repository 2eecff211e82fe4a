"""Finds the PyTorch DataLoader settings that keep a training loop fed, and measures the speedup.

    from autotune_loader import AutoLoader, load_config, tune

    loader = AutoLoader(dataset, batch_size=64, shuffle=True)       # a DataLoader that tunes itself during training

    result = tune(DataLoader(dataset, batch_size=64, shuffle=True), model, output="loader.json")
    loader = result.apply_to(loader)                                # your loader with the settings that were measured
    loader = DataLoader(dataset, batch_size=64, shuffle=True, **load_config("loader.json").to_kwargs())

Names are loaded when they are first used: reading a `loader.json` needs no torch, and `--help` should not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_loader.version import __version__ as __version__

if TYPE_CHECKING:  # "as": type checkers take the name for a public one
    from autotune_loader.autoloader.live import Found as Found
    from autotune_loader.autoloader.loader import AutoLoader as AutoLoader
    from autotune_loader.pipeline.batches import DevicePrefetcher as DevicePrefetcher
    from autotune_loader.report.script import ScriptReport as ScriptReport
    from autotune_loader.results.comparison import Comparison as Comparison
    from autotune_loader.results.file import load_config as load_config
    from autotune_loader.results.result import Finding as Finding
    from autotune_loader.results.result import TuningResult as TuningResult
    from autotune_loader.search.belief import Prediction as Prediction
    from autotune_loader.search.sampler import TwinSampler as TwinSampler
    from autotune_loader.tuning.compare import compare as compare
    from autotune_loader.tuning.tune import tune as tune
    from autotune_loader.values import ConfigFileError as ConfigFileError
    from autotune_loader.values import Interval as Interval
    from autotune_loader.values import LoaderConfig as LoaderConfig
    from autotune_loader.values import MachineMismatchError as MachineMismatchError
    from autotune_loader.values import MissingExtraError as MissingExtraError
    from autotune_loader.values import PlatformError as PlatformError
    from autotune_loader.values import TunerError as TunerError
    from autotune_loader.values import WorkloadError as WorkloadError
    from autotune_loader.watch.hook import Hook as Hook
    from autotune_loader.watch.hook import enable as enable
else:  # not for type checkers, which would take every misspelled name for one that `__getattr__` finds
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
        "tune": "tuning.tune",
    }
    __all__ = sorted([*_HOMES, "__version__"])
    _FOR_TUNING = ("optuna", "cloudpickle")

    def __getattr__(name):
        from importlib import import_module

        if name == "load_ipython_extension":  # of `%load_ext autotune_loader`
            return import_module(f"{__name__}.integrations.ipython").load_ipython_extension
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        try:
            home = import_module(f"{__name__}.{_HOMES[name]}")
        except ModuleNotFoundError as error:
            if error.name not in _FOR_TUNING:
                raise
            from autotune_loader.values import MissingExtraError

            feature = f"{name}()" if name.islower() else name
            raise MissingExtraError(feature, error.name, "tune") from None
        globals()[name] = getattr(home, name)
        return globals()[name]

    def __dir__():
        return __all__
