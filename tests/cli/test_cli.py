"""The command line as its users meet it: `main(arguments)` in this process, and a few runs in one of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
from report.example import synthetic_result
from torch.utils.data import DataLoader

import autotune_loader
from autotune_loader import cli, demo
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.fingerprint import Fingerprint
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError

TRAIN = """
class Numbers(list):
    pass

NUMBERS = Numbers()
make_numbers = lambda: NUMBERS
make_pair = lambda: (NUMBERS, "a model")
make_arguments = lambda: {"data": NUMBERS, "batch_size": 4, "budget": "9s"}
make_mistyped = lambda: {"data": NUMBERS, "batchsize": 4}
make_nothing = lambda: None
make_with = lambda folder: NUMBERS
make_broken = lambda: open_the_files()

def open_the_files():
    raise KeyError("no such split: 'trian'")

def make_slow():
    raise KeyboardInterrupt
"""


REAL = autotune_loader.tune


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return replace(synthetic_result(), machine=inspect_machine().fingerprint())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, with `train.py`; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "jobs").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_here\n")
    (tmp_path / "json.py").write_text("make = lambda: [1]\n")
    (tmp_path / "jobs" / "neighbour.py").write_text("ITEMS = [1, 2, 3]")
    (tmp_path / "jobs" / "job.py").write_text("import neighbour, train\nmake = lambda: neighbour.ITEMS\n")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, result: TuningResult) -> Mock:
    """Stands for `tune()`, and answers with a result made beforehand."""
    fake: Mock = create_autospec(REAL, return_value=result)
    monkeypatch.setattr(autotune_loader, "tune", fake)
    return fake


@pytest.fixture
def loader_json(folder: Path, result: TuningResult) -> str:
    for name in ("saved.json", "loader.json"):
        result.save(folder / name)
    return "loader.json"


def test_every_command_is_listed_and_its_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("demo", "doctor", "run", "show", "tune", "watch"):
        assert f"\n  {command} " in listed
        assert cli.main([command, "--help"]) == 0
        told = capsys.readouterr().out
        assert f"\n    autotune-loader {command}" in told
        assert command in ("run", "watch") or max(map(len, told.splitlines())) <= 80


@pytest.mark.process
def test_help_imports_neither_torch_nor_what_only_some_commands_need() -> None:
    heavy = ("torch", "optuna", "pandas", "rich", "matplotlib", "psutil", "pynvml", "PIL")
    script = (
        "import sys; from autotune_loader.cli import main; main(['--help']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("tun", "No such command 'tun'"),
        ("tune train:make_numbers --buget 3m", "--budget"),
        ("tune trian:make_numbers", "Error: there is no module 'trian'"),
        ("tune trian.py:make_numbers", "Error: there is no file 'trian.py'"),
        ("tune json.py:make", "Error: 'json.py' cannot be imported: another module has the name 'json'"),
        ("tune train:make_number", "Error: train has no 'make_number'; did you mean 'make_numbers'?"),
        ("tune train:make_with", "missing 1 required positional argument: 'folder'"),
        ("tune train:make_nothing", "Error: train:make_nothing gives None; it has to give a dataset"),
        ("tune train:make_mistyped", "unexpected keyword argument 'batchsize'"),
        ("tune broken:make", "No module named 'a_package_that_is_not_here'"),
        ("show nowhere.json", "nowhere.json"),
        ("show train.py --code", "is not a valid loader.json"),
        ("show loader.json --html no/page.html", "--html="),
        ("compare a.json b.json", "No such command 'compare'"),
        ("tune train.py", "'train.py' does not name a factory; train.py:make_loader"),
    ],
)
def test_a_wrong_line_is_bad_input_and_answered_with_what_would_work(
    line: str, told: str, tune: Mock, loader_json: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("target", "own", "not_theirs"),
    [("train:make_broken", "in open_the_files", "factories.py"), ("broken:make", 'broken.py"', "importlib")],
)
def test_an_exception_of_the_users_code_has_their_own_traceback_alone(
    target: str, own: str, not_theirs: str, tune: Mock, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert cli.main(["tune", target]) == 2
    told = capsys.readouterr().err
    assert (own in told, not_theirs in told) == (True, False)
    # AND one of a burst, which tune() tells of
    tune.side_effect = WorkloadError("the first batch failed", "Traceback ...\nRuntimeError: shapes do not fit")
    assert cli.main(["tune", "train:make_numbers"]) == 2
    assert capsys.readouterr().err.endswith("Traceback ...\nRuntimeError: shapes do not fit\n")


def test_ctrl_c_before_anything_was_found_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "train:make_slow"]) == 130
    assert capsys.readouterr().err.strip() == "Interrupted."


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("train:make_numbers", {}),
        ("train.py:make_numbers", {}),
        ("./train.py:NUMBERS", {}),
        ("train:make_pair", {"model": "a model"}),
        ("train:make_arguments", {"batch_size": 4, "budget": "9s"}),
        ("jobs/job.py:make", {}),
    ],
)
def test_tunes_what_a_factory_makes(target: str, expected: dict[str, Any], tune: Mock) -> None:
    assert cli.main(["tune", target, "--quiet"]) == 0
    ((data,), given) = tune.call_args
    assert given == {"output": "loader.json", "progress": False, **expected}
    assert data == [1, 2, 3] if target.startswith("jobs") else type(data).__name__ == "Numbers"


def test_every_option_that_can_be_typed_reaches_tune_and_wins_over_the_factory(tune: Mock) -> None:
    options = {"budget": "3m", "max_workers": 4, "output": "out.json"}
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert cli.main(["tune", "train:make_arguments", *typed, "--allow", "in_order", "--allow", "batch_size"]) == 0
    more = {"allow": ("in_order", "batch_size"), "progress": True, "batch_size": 4}
    assert tune.call_args.kwargs == {**options, **more}


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("undecided", 0), ("fallback", 3), ("partial", 130)])
def test_tune_prints_the_report_and_its_exit_code_tells_how_it_ended(
    status: str, code: int, tune: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    tune.return_value = replace(tune.return_value, status=status)
    assert cli.main(["tune", "train:make_numbers", "-o", "loader.json"]) == code
    text = capsys.readouterr().out
    assert "Bottleneck: CPU." in text
    assert text.endswith("Written to loader.json. For your training script: autotune-loader show loader.json --code\n")


NOISY = """
import os, subprocess, autotune_loader
from autotune_loader.results.result import TuningResult
def tune(*_, **__):
    subprocess.run(["echo", "a child prints"])
    os.write(1, b"C prints\\n")
    return TuningResult.load("loader.json")
autotune_loader.tune = tune
make = lambda: print("the factory prints") or [1, 2]
"""


@pytest.mark.process
def test_json_is_all_there_is_on_stdout(folder: Path, loader_json: str) -> None:
    # GIVEN a factory, C in a tune() and a child process that all print
    (folder / "noisy.py").write_text(NOISY)
    # WHEN the result is wanted as JSON
    command = [sys.executable, "-P", "-m", "autotune_loader", "tune", "noisy.py:make", "--json"]
    (folder / "json.py").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # THEN stdout is the result, and nothing that was printed is lost
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(Path(loader_json).read_text())
    assert all(text in done.stderr for text in ("the factory prints", "a child prints", "C prints"))


OTHER_MACHINE = Fingerprint(usable_cores=1024, memory_bytes=1 << 30, gpus=("H100",), torch="2.6.0")


@pytest.mark.parametrize(
    ("tuned_on", "told"),
    [
        ({}, "This machine is the same in all that matters."),
        ({"machine": None}, r"15 bursts in 24 s.\n$"),
        # What matters comes first.
        (
            {"machine": OTHER_MACHINE},
            r"2026-11-26, 1,024 cores, 1 GiB, H100,\s+torch 2.6.0.\n\n! usable cores: 1024 then, \d.*\n! GPU.*\n~ memory",
        ),
    ],
    ids=["the same", "not told", "another"],
)
def test_show_prints_the_report_and_whether_this_machine_fits(
    tuned_on: dict[str, Any], told: str, result: TuningResult, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(result, **tuned_on).save("saved.json")
    assert cli.main(["show", "saved.json"]) == 0
    text = capsys.readouterr().out
    assert "Bottleneck: CPU." in text
    assert re.search(told, text, re.DOTALL)


def test_show_html_writes_a_page(loader_json: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", loader_json, "--html", "page.html"]) == 0
    assert capsys.readouterr().out == "Written to page.html.\n"
    assert Path("page.html").read_text().startswith("<!doctype html>")


OTHER = LoaderConfig(
    num_workers=2, pin_memory=True, persistent_workers=True, in_order=False, multiprocessing_context="spawn",
    batch_size=3, device_prefetch=2,
)  # fmt: skip


@pytest.mark.parametrize("config", [LoaderConfig(), OTHER], ids=str)
def test_the_code_of_a_result_runs(
    config: LoaderConfig, result: TuningResult, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(result, best=config).save("saved.json")
    assert cli.main(["show", "saved.json", "--code"]) == 0
    names, code = dict[str, Any](), capsys.readouterr().out
    exec(code, names)
    batch_size = {} if config.batch_size is None else {"batch_size": config.batch_size}
    assert names["loader_arguments"] == {**batch_size, **config.to_kwargs()}
    assert len(DataLoader([1, 2, 3], **names["loader_arguments"])) in (1, 3)
    assert ("DevicePrefetcher(loader, 'cuda', depth=2)" in code) == bool(config.device_prefetch)


def test_demo_tunes_its_small_job_within_the_budget_and_writes_the_file(
    folder: Path, tune: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN pictures of which an interrupted run has left all but one
    pictures, make = folder / "pictures", partial(demo.make_jpegs, count=40, size=(80, 60))
    before = {path: path.read_bytes() for path in make(pictures)}
    min(before).unlink()
    monkeypatch.setattr(demo, "cache_folder", lambda: pictures)
    monkeypatch.setattr(demo, "make_jpegs", make)
    mine = Path("loader.json")
    mine.write_text("of my own project")
    assert cli.main(["demo", "--budget", "5s"]) == 0
    # THEN that one is made anew as it was, the job fits together, and nothing of the user's folder is touched
    assert {path: path.read_bytes() for path in pictures.iterdir()} == before
    (loader, model), given = tune.call_args
    assert model(next(iter(loader))[0]).shape == (loader.batch_size, demo.CLASSES)
    assert mine.read_text() == "of my own project"
    output = Path(given["output"])
    assert (given["budget"], output.name, output.parent.parent) == ("5s", "loader.json", Path(tempfile.gettempdir()))
    assert f"Written to {output}." in capsys.readouterr().out
