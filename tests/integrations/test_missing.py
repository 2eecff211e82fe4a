import sys

import pytest
from torch.utils.data import DataLoader

from autotune_loader.demo import make_jpegs
from autotune_loader.integrations.accelerate import tune_before_prepare, tune_live
from autotune_loader.integrations.lightning import tuned
from autotune_loader.integrations.transformers import tune_trainer
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig, MissingExtraError

GUESS = TuningResult(best=LoaderConfig(), status="fallback")
CALLS = {
    "lightning": ("lightning", lambda: tuned(None)),
    "transformers": ("transformers", lambda: tune_trainer(None)),
    "accelerate": ("accelerate", lambda: tune_before_prepare(None, DataLoader([1, 2]))),
    "accelerate.data_loader": ("accelerate", lambda: tune_live(None)),
    "matplotlib": ("plots", GUESS.plot_workers),
    "pandas": ("tune", GUESS.to_dataframe),
    "PIL": ("demo", lambda: make_jpegs(None)),
}


@pytest.mark.parametrize("module", CALLS)
def test_a_missing_package_is_answered_with_pip(module, monkeypatch):
    package = module.partition(".")[0]
    for name in (package, *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"pytorch_{package}", raising=False)
    extra, call = CALLS[module]
    with pytest.raises(MissingExtraError, match=rf"pip install 'autotune-loader\[{extra}\]'$"):
        call()
