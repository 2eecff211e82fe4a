"""What a user gets wrong outside of the arguments' own forms is told before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune_loader import cli, tune
from autotune_loader.results.loader_file import ENDED
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.assemble import NOT_WRITTEN
from autotune_loader.tuning.study import open_database
from autotune_loader.values.errors import MissingExtraError
from tests.support import SimulatedMachine, on_simulated_machines

DATASET = [(torch.rand(4), 0)] * 64


def test_a_device_that_is_not_there_is_refused_before_a_probe_starts() -> None:
    with pytest.raises(
        ValueError, match=r"device='cuda:97' is not there \(torch sees \d+ CUDA device.*'auto' would work"
    ):
        tune(DATASET, torch.nn.Linear(4, 2), batch_size=8, device="cuda:97")


@pytest.mark.parametrize("name", ["", "a-file/loader.json"])
def test_an_output_that_cannot_be_written_is_refused_before_a_probe_starts(tmp_path: Path, name: str) -> None:
    # GIVEN a folder, or a file where a folder should be
    (tmp_path / "a-file").touch()
    # WHEN the result is to be written there THEN it is refused at once, and nothing is left
    with pytest.raises(ValueError, match=r"cannot be written .*output='loader.json' would work"):
        tune(DATASET, batch_size=8, output=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_disk_that_fills_up_meanwhile_costs_a_warning_and_not_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a disk that is full by the time the result is written
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TuningResult, "save", no_space)
    # WHEN tuning ends
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine())
    result = tune(DATASET, batch_size=8, output=tmp_path / "x.json", reuse=False, progress=False)
    # THEN the result is there, and says that its file is not
    assert result.status in ENDED
    assert any(NOT_WRITTEN in warning for warning in result.warnings)


def test_an_unknown_database_is_refused_with_one_that_works() -> None:
    with pytest.raises(
        ValueError, match=r"storage='nosuch://x' names no database .*storage='study.journal' would work"
    ):
        open_database("nosuch://x")


def test_a_database_without_its_driver_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'autotune-loader\[postgres\]'"):
        open_database("postgresql+psycopg2://nobody@127.0.0.1:1/x")


def test_the_command_line_answers_all_of_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job_of_wrong_input.py").write_text("def make():\n    return [(1, 2)] * 8\n")
    assert (
        cli.main(
            [
                "tune",
                f"{tmp_path}/job_of_wrong_input.py:make",
                "-o",
                f"{tmp_path}/job_of_wrong_input.py/x.json",
                "--quiet",
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.startswith("Error: output=")
