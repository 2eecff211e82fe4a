"""`%%watch` in IPython's own shell."""

import pytest

from autotune_loader.machine import processes

interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
pytestmark = pytest.mark.process  # under run, the proof that workers are safe forks
LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from autotune_loader import enable
from tests.integrations.job import Waiting
kept = DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=8)
"""


@pytest.fixture
def shell(monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = interactiveshell.InteractiveShell()
    for cell in ("%load_ext autotune_loader", LOADERS):
        shell.run_cell(cell).raise_error()
    yield shell
    shell.history_manager.end_session()


@pytest.mark.parametrize("verb", ["watch", "run"])
def test_a_cells_report_names_the_notebooks_lines(shell, capsys, verb):
    # GIVEN a cell that makes a loader and has another one
    made = "made = DataLoader(TensorDataset(torch.rand(40, 4)))"
    ran = shell.run_cell(f"%%watch {verb}\n{made}\nx = len([*made, *kept])")
    assert ran.success
    assert shell.user_ns["x"] == 48
    # THEN both are told of
    report = capsys.readouterr().err
    assert f"autotune-loader {verb}: 2 loaders" in report
    assert "cell:2  TensorDataset[40]" in report
    assert "cell:3  TensorDataset[64]" in report
    # AND the next cell is left alone
    shell.run_cell("list(kept)")
    assert "autotune-loader" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("head", "after", "step"),
    [
        ("%%watch\n", "", "%%watch run --allow-workers"),
        ("%%watch run\n", "", "%%watch run --allow-workers"),
        # a worker that takes longer to start than the cell would be the first thing to say
        ("with enable(): ", "num_workers=1, multiprocessing_context='fork'", "%%watch run"),
    ],
)
def test_a_cells_next_step_is_a_cell(shell, capsys, monkeypatch, head, after, step):
    monkeypatch.setattr(processes, "queued_s", lambda task: 0.0)  # as on an idle machine
    cell = f"{head}list(DataLoader(Waiting(480, 0.002), batch_size=8, {after}))"
    shell.run_cell(cell).raise_error()
    assert f"next: `{step}` tries" in capsys.readouterr().err
    # AND works as printed
    shell.run_cell(f"{step}\nlist(kept)").raise_error()
    assert "autotune-loader run: 1 loader in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", ["run --workers", "watch --allow-workers", "runs", "--worker", "-o x"]
)
def test_an_unknown_option_is_answered_with_another(shell, options):
    ran = shell.run_cell(f"%%watch {options}\nlist(kept)")
    assert isinstance(ran.error_in_exec, ValueError)
    assert "Try %%watch run --allow-workers." in str(ran.error_in_exec)


def test_a_cell_that_fails_is_reported(shell, capsys):
    ran = shell.run_cell("%%watch\nlist(kept)\n1 / 0")
    captured = capsys.readouterr()
    assert isinstance(ran.error_in_exec, ZeroDivisionError)
    assert captured.out.count("Traceback") == 1
    assert "autotune_loader" not in captured.out
    assert "8 batches" in captured.err


def test_another_magic_may_follow(shell, capsys):
    assert shell.run_cell("%%watch\n%%time\nx = len(list(kept))").success
    assert shell.user_ns["x"] == 8
    assert "8 batches" in capsys.readouterr().err
