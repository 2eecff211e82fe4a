import sys

import pytest
from torch.utils.data import DataLoader

from autotune_loader.integrations.accelerate import tune_before_prepare
from autotune_loader.integrations.lightning import tuned
from autotune_loader.integrations.transformers import tune_trainer
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig, MissingExtraError

CALLS = {
    "lightning": lambda: tuned(None),
    "transformers": lambda: tune_trainer(None),
    "accelerate": lambda: tune_before_prepare(None, DataLoader([1, 2])),
    "matplotlib": lambda: TuningResult(best=LoaderConfig(), status="fallback").plot_workers(),
}


@pytest.mark.parametrize("package", CALLS)
def test_a_missing_package_is_answered_with_pip(package, monkeypatch):
    for name in (package, *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"pytorch_{package}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install '{package}'$"):
        CALLS[package]()
