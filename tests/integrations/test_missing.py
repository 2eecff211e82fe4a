from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.integrations.accelerate import tune_before_prepare
from autotune_loader.integrations.lightning import tuned
from autotune_loader.integrations.transformers import tune_trainer
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError

CALLS = {
    "lightning": ("lightning", lambda: tuned(None)),
    "transformers": ("transformers", lambda: tune_trainer(None)),
    "accelerate": ("accelerate", lambda: tune_before_prepare(None, DataLoader(TensorDataset(torch.zeros(4, 2))))),
    "plots": ("matplotlib", lambda: TuningResult(best=LoaderConfig(), status="fallback").plot_workers()),
}


@pytest.mark.parametrize("extra", sorted(CALLS))
def test_a_missing_package_is_answered_with_its_install_line(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, call = CALLS[extra]
    names = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *names):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingExtraError, match=rf"pip install '{package}'$"):
        call()
