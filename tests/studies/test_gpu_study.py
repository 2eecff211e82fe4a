"""The study of the GPU runs in small on a CPU, and each of its parts ends before a command of ten minutes is cut off."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from studies.gpu import __main__ as jobs

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SCRIPT = (Path(__file__).parents[2] / "studies" / "gpu" / "run.sh").read_text()


def test_every_module_of_the_script_is_there_and_each_part_ends_within_eight_minutes() -> None:
    modules = set(re.findall(r"-m (studies[.\w]+)", SCRIPT))
    assert modules == {"studies.gpu", "studies.gpu.uses"}
    assert all(importlib.util.find_spec(module) for module in modules)
    limits = {name: int(most) for name, most in re.findall(r"^(tests|uses)\(\) \{ limited (\d+)", SCRIPT, re.MULTILINE)}
    parts = dict(re.findall(r"^(first|second|third)\(\) \{ (.+) \}$", SCRIPT, re.MULTILINE))
    assert len(parts) == 3
    for part in parts.values():
        seconds = [int(most) for most in re.findall(r"study (\d+)", part)]
        seconds += [limits[name] for name in re.findall(r"\b(tests|uses)\b", part)]
        assert 0 < sum(seconds) < 8 * 60, part


def test_without_a_gpu_the_study_says_which_command_works(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with pytest.raises(SystemExit) as ended:
        jobs.main([])
    assert ended.value.code == 2
    assert "--device cpu --quick" in capsys.readouterr().err


@pytest.mark.system
def test_a_job_runs_in_small_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # put back afterwards
    jobs.main(["--device", "cpu", "--quick", "--only", "transformer", "--budget", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("RECORD") for line in lines) >= 8
    row = lines[-1].split(" | ")
    assert len(row) == len(jobs.COLUMNS)
    assert row[0] == "| transformer (step)"
