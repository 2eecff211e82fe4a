"""`%%watch` in IPython's own shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
pytestmark = pytest.mark.process  # under run, the proof that workers are safe forks
LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
kept = DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=8)
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = interactiveshell.InteractiveShell()
    for cell in ("%load_ext autotune_loader", LOADERS):
        shell.run_cell(cell).raise_error()
    yield shell
    shell.history_manager.end_session()


@pytest.mark.parametrize("verb", ["watch", "run"])
def test_a_cell_is_told_of_by_its_lines(shell: Any, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    # GIVEN a cell with a loader of its own and one of an earlier cell WHEN it is run under %%watch
    ran = shell.run_cell(
        f"%%watch {verb}\nmade = DataLoader(TensorDataset(torch.rand(40, 4)))\nx = len([*made, *kept])"
    )

    # THEN it has done what it does, each is told of by the line that the notebook shows, and the next cell is left alone
    assert (ran.success, shell.user_ns["x"]) == (True, 48)
    report = capsys.readouterr().err
    assert f"autotune-loader {verb}: 2 loaders" in report
    assert "cell:2  TensorDataset[40]" in report
    assert "cell:3  TensorDataset[64]" in report
    shell.run_cell("list(kept)")
    assert "autotune-loader" not in capsys.readouterr().err


def test_a_cell_that_fails_has_failed_and_another_cell_magic_may_follow(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = shell.run_cell("%%watch\nlist(kept)\n1 / 0")

    assert isinstance(ran.error_in_exec, ZeroDivisionError)
    captured = capsys.readouterr()
    assert captured.out.count("Traceback") == 1
    assert "autotune_loader" not in captured.out
    assert "8 batches" in captured.err

    assert shell.run_cell("%%watch\n%%time\nx = len(list(kept))").success
    assert (shell.user_ns["x"], "8 batches" in capsys.readouterr().err) == (8, True)
