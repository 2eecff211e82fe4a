from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.integrations.accelerate import tune_before_prepare
from autotune_loader.integrations.lightning import tuned
from autotune_loader.integrations.transformers import tune_trainer
from autotune_loader.values.errors import MissingExtraError

CALLS = {
    "lightning": lambda: tuned(None),
    "transformers": lambda: tune_trainer(None),
    "accelerate": lambda: tune_before_prepare(None, DataLoader(TensorDataset(torch.zeros(4, 2)))),
}


@pytest.mark.parametrize("package", sorted(CALLS))
def test_a_missing_package_is_answered_with_its_install_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *names):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingExtraError, match=rf"pip install 'autotune-loader\[{package}\]'"):
        CALLS[package]()
