from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from studies import frameworks
from studies.gpu.__main__ import main, table
from studies.gpu.study import Findings

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

ROOT = Path(__file__).parents[2]
FOUND = Findings(
    job="resnet_jpeg",
    binds="loader",
    verdict="cpu",
    best="16 workers, prefetch 2, pinned",
    grid_best="16 workers, prefetch 2, pinned",
    default_per_s=100.0,
    tuned_per_s=1500.0,
    grid_best_per_s=1515.0,
    step_limit_per_s=4000.0,
    loader_limit_per_s=1550.0,
    of_limit=1500 / 1550,
    regret=0.01,
    regret_low=-0.01,
    regret_high=0.03,
    prefetcher=1.04,
    prefetcher_low=1.01,
    prefetcher_high=1.07,
    burst_busy_share=0.4,
    burst_util=0.42,
    default_util=0.05,
    tuned_util=0.41,
    util_reason=None,
    twin_median_error=0.04,
    twin_worst_error=0.12,
    tune_s=28.4,
    startup_s=6.0,
    verdict_s=2.2,
    said_compute_bound=False,
    copy_ms=1.5,
    allocated_mib=2048.0,
    trials=14,
    failures=(),
    grid={},
)


def test_a_row_has_each_figure_beside_its_goal() -> None:
    head, _, row = table([FOUND]).splitlines()
    assert "goal 95%" in head
    assert "goal 3 s" in head
    assert row == (
        "| resnet_jpeg | loader | cpu | 100.0 | 1,500.0 (15.00x) | 96.8% of 1,550.0 | 1.0% (-1.0% to 3.0%) | 5.0%, 41.0% | "
        "40.0%, 42.0% | 1.04x (1.01 to 1.07) | 4.0%, 12.0% | 2.2 s + 6.0 s of start-up: step does not bind | "
        "16 workers, prefetch 2, pinned, in 28 s and 14 trials |"
    )


def test_what_was_not_measured_is_no_zero() -> None:
    row = table(
        [
            replace(
                FOUND,
                default_util=None,
                tuned_util=None,
                util_reason="no driver",
                prefetcher=None,
                twin_median_error=None,
            )
        ]
    )
    assert "| -, - (no driver) | 40.0%, 42.0% | - | -, 12.0% |" in row


def test_every_script_of_the_run_is_there_and_each_part_ends_within_eight_minutes() -> None:
    # GIVEN the script that is run where a GPU is
    script = (ROOT / "studies" / "gpu" / "run.sh").read_text()
    # THEN what it starts can be found
    modules, files = set(re.findall(r"-m (studies[.\w]+)", script)), set(re.findall(r"tests/\S+\.py", script))
    assert {"studies.gpu", "studies.frameworks"} <= modules
    assert len(files) == 2
    assert all(importlib.util.find_spec(module) for module in modules)
    assert all((ROOT / file).exists() for file in files)
    # THEN a part is ended before a command of ten minutes is
    limits = {name: int(most) for name, most in re.findall(r"^(\w+)\(\) \{\s+limited (\d+)", script, re.MULTILINE)}
    parts = dict(re.findall(r"^(first|second|third)\) (.+) ;;$", script, re.MULTILINE))
    assert len(parts) == 3
    for part in parts.values():
        seconds = [int(most) for most in re.findall(r"study_of (\d+)", part)]
        seconds += [limits[name] for name in re.findall(r"\b(tests|frameworks)\b", part)]
        assert 0 < sum(seconds) < 8 * 60, part


def test_without_a_gpu_the_study_says_which_command_works(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "--device cpu --quick" in capsys.readouterr().err


def test_an_unknown_framework_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frameworks.main(["--only", "Lightning,Keras"])
    assert "'Keras' is none of plain PyTorch, " in capsys.readouterr().err


@pytest.mark.system
def test_the_study_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    main(["--device", "cpu", "--quick", "--only", "transformer", "--out", str(tmp_path)])
    document = json.loads((tmp_path / "gpu.json").read_text())
    (job,) = document["jobs"]
    assert (job["job"], document["machine"]["quick"]) == ("transformer", True)
    assert job["tuned_per_s"] > 0
    assert len(job["grid"]) == 2
    assert "transformer" in (tmp_path / "gpu.md").read_text()
