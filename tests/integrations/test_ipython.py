"""`%%watch` in IPython's own shell."""

import pytest

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
def test_a_cell_is_told_of_by_the_lines_that_the_notebook_shows_and_the_next_one_is_left_alone(
    shell, capsys, verb
):
    cell = f"%%watch {verb}\nmade = DataLoader(TensorDataset(torch.rand(40, 4)))\nx = len([*made, *kept])"
    assert (shell.run_cell(cell).success, shell.user_ns["x"]) == (True, 48)
    report = capsys.readouterr().err
    told = (
        f"autotune-loader {verb}: 2 loaders",
        "cell:2  TensorDataset[40]",
        "cell:3  TensorDataset[64]",
    )
    assert [text for text in told if text not in report] == []
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
def test_the_next_step_of_a_cell_is_a_cell(shell, capsys, head, after, step):
    shell.run_cell(
        f"{head}list(DataLoader(Waiting(480, 0.002), batch_size=8, {after}))"
    ).raise_error()
    assert f"next: `{step}` tries" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["run --workers", "watch --allow-workers", "runs"])
def test_an_option_that_a_cell_cannot_have_is_answered_with_one_that_works(shell, options):
    ran = shell.run_cell(f"%%watch {options}\nlist(kept)")
    assert isinstance(ran.error_in_exec, ValueError)
    assert "%%watch run --allow-workers would work" in str(ran.error_in_exec)


def test_a_cell_that_fails_has_failed_and_another_cell_magic_may_follow(shell, capsys):
    ran = shell.run_cell("%%watch\nlist(kept)\n1 / 0")
    captured = capsys.readouterr()
    assert isinstance(ran.error_in_exec, ZeroDivisionError)
    assert (captured.out.count("Traceback"), "autotune_loader" in captured.out) == (1, False)
    assert "8 batches" in captured.err
    assert shell.run_cell("%%watch\n%%time\nx = len(list(kept))").success
    assert (shell.user_ns["x"], "8 batches" in capsys.readouterr().err) == (8, True)
