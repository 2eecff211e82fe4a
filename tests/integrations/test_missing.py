import sys

import pytest
from torch.utils.data import DataLoader

from autotune_loader.integrations.accelerate import tune_before_prepare, tune_live
from autotune_loader.integrations.lightning import tuned
from autotune_loader.integrations.transformers import tune_trainer
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig, MissingExtraError

CALLS = {
    "lightning": lambda: tuned(None),
    "transformers": lambda: tune_trainer(None),
    "accelerate": lambda: tune_before_prepare(None, DataLoader([1, 2])),
    "accelerate.data_loader": lambda: tune_live(None),
    "matplotlib": lambda: TuningResult(best=LoaderConfig(), status="fallback").plot_workers(),
}


@pytest.mark.parametrize("module", CALLS)
def test_a_missing_package_is_answered_with_pip(module, monkeypatch):
    package = module.partition(".")[0]
    for name in (package, *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"pytorch_{package}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install '{package}'$"):
        CALLS[module]()
