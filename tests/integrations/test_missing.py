from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.integrations.accelerate import tune_before_prepare
from autotune_loader.integrations.lightning import tuned
from autotune_loader.integrations.transformers import tune_trainer
from autotune_loader.values.errors import MissingExtraError

DATA = TensorDataset(torch.zeros(4, 2))
CALLS = {
    "lightning": lambda: tuned(None),
    "transformers": lambda: tune_trainer(None),
    "accelerate": lambda: tune_before_prepare(None, DataLoader(DATA)),
}


@pytest.mark.parametrize("package", sorted(CALLS))
def test_a_missing_package_is_answered_with_its_install_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a machine without the package
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    missing: dict[str, Any] = dict.fromkeys([package, *names])
    for name, module in missing.items():
        monkeypatch.setitem(sys.modules, name, module)

    # WHEN its integration is used THEN the message can be pasted into a shell
    with pytest.raises(MissingExtraError, match=rf"pip install 'autotune-loader\[{package}\]'"):
        CALLS[package]()
