"""Finds the cheapest PyTorch DataLoader configuration that is as fast as anything this machine can do, and proves it.

from autotune_loader import tune, load_config

result = tune(dataset, model, batch_size=64, output="loader.json")
config = load_config("loader.json")
loader = DataLoader(dataset, batch_size=64, shuffle=True, **config.to_kwargs())
"""

from autotune_loader.config import LoaderConfig
from autotune_loader.errors import TunerError
from autotune_loader.prefetch import DevicePrefetcher
from autotune_loader.result import TuningResult, load_config
from autotune_loader.tuner import tune
from autotune_loader.version import __version__

__all__ = ["DevicePrefetcher", "LoaderConfig", "TunerError", "TuningResult", "__version__", "load_config", "tune"]
