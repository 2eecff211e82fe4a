"""The command line as its users meet it: `main(arguments)` in this process, and a few runs in one of their own."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
from report.example import synthetic_result
from torch.utils.data import DataLoader

import autotune_loader.tuning.tune
from autotune_loader import cli, demo
from autotune_loader.cli.files import snippet
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError

TRAIN = """
class Numbers(list):
    pass

NUMBERS = Numbers()
make_numbers = lambda: NUMBERS
make_pair = lambda: (NUMBERS, "a model")
make_arguments = lambda: {"dataset_or_loader": NUMBERS, "batch_size": 4, "budget": "9s"}
make_mistyped = lambda: {"dataset_or_loader": NUMBERS, "batchsize": 4}
make_nothing = lambda: None
make_with = lambda folder: NUMBERS
make_broken = lambda: open_the_files()

def open_the_files():
    raise KeyError("no such split: 'trian'")

def make_slow():
    raise KeyboardInterrupt
"""


REAL = autotune_loader.tuning.tune.tune


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return replace(synthetic_result(), fingerprint=inspect_machine().fingerprint())


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
    monkeypatch.setattr(autotune_loader.tuning.tune, "tune", fake)
    return fake


@pytest.fixture
def loader_json(folder: Path, result: TuningResult) -> str:
    for name in ("saved.json", "loader.json"):
        result.save(folder / name)
    return "loader.json"


def test_every_command_is_listed_and_its_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("apply", "compare", "demo", "doctor", "run", "show", "tune", "watch"):
        assert f"\n  {command} " in listed
        assert cli.main([command, "--help"]) == 0
        assert f"\n    autotune-loader {command}" in capsys.readouterr().out


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
        ("apply train.py", "is not a valid loader.json"),
        ("show loader.json --html no/page.html", "--html="),
        ("compare loader.json train.py", "watch --json train.py 2>"),
        ("compare loader.json saved.json", "need --job"),
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
    target: str, own: str, not_theirs: str, tune: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", target]) == 2
    told = capsys.readouterr().err
    assert (own in told, not_theirs in told) == (True, False)
    # AND one of a burst, which tune() tells of
    tune.side_effect = WorkloadError("the first batch failed", "Traceback ...\nRuntimeError: shapes do not fit")
    assert cli.main(["tune", "train:make_numbers"]) == 2
    assert capsys.readouterr().err.endswith("Traceback ...\nRuntimeError: shapes do not fit\n")
    with pytest.raises(WorkloadError):
        cli.main(["--traceback", "tune", "train:make_numbers"])


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
        ("jobs/job.py:make", {"dataset_or_loader": [1, 2, 3]}),
    ],
)
def test_tunes_what_a_factory_makes(target: str, expected: dict[str, Any], tune: Mock) -> None:
    assert cli.main(["tune", target, "--quiet"]) == 0
    given = tune.call_args.kwargs
    assert given == {"dataset_or_loader": given["dataset_or_loader"], "progress": "off", **expected}
    assert "dataset_or_loader" in expected or type(given["dataset_or_loader"]).__name__ == "Numbers"


def test_every_option_that_can_be_typed_reaches_tune_and_wins_over_the_factory(tune: Mock) -> None:
    options = {
        "budget": "3m", "max_trials": 7, "max_workers": 4, "max_cores": 2, "max_host_memory": "8GB", "max_shm": "1GiB",
        "tolerance": 0.05, "search": "random", "seed": 3, "isolation": "inline", "storage": "s.journal", "study_name": "n",
        "batch_size": 16, "device": "cpu", "output": "out.json",
    }  # fmt: skip
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags = ["--allow", "in_order", "--allow", "drop_last", "--no-reuse", "--no-stages"]
    assert cli.main(["tune", "train:make_arguments", *typed, *flags]) == 0
    more = {"allow": ("in_order", "drop_last"), "reuse": False, "stages": False, "progress": "on"}
    dataset, given = tune.call_args.kwargs["dataset_or_loader"], tune.call_args.kwargs
    assert type(dataset).__name__ == "Numbers"
    assert given == {"dataset_or_loader": dataset, **options, **more}
    objects = "dataset_or_loader model loss_fn train_step optimizer collate_fn sampler batch_sampler worker_init_fn"
    assert set(inspect.signature(REAL).parameters) == {*objects.split(), "generator", "drop_last", *options, *more}


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("undecided", 0), ("fallback", 3), ("partial", 130)])
def test_tune_prints_the_report_and_its_exit_code_tells_how_it_ended(
    status: str, code: int, tune: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    tune.return_value = replace(tune.return_value, status=status)
    assert cli.main(["tune", "train:make_numbers", "-o", "loader.json"]) == code
    text = capsys.readouterr().out
    assert "Verdict: The CPU binds" in text
    assert "autotune-loader apply loader.json --to snippet" in text


NOISY = """
import os, subprocess, autotune_loader.tuning.tune as tuner
from autotune_loader.results.result import TuningResult
def tune(**_):
    subprocess.run(["echo", "a child prints"])
    os.write(1, b"C prints\\n")
    return TuningResult.load("loader.json")
tuner.tune = tune
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
        ({"fingerprint": None}, "The file does not say on which machine it was tuned."),
        # What matters comes first.
        (
            {"fingerprint": OTHER_MACHINE},
            r"Tuned on: 1,?024 cores, 1 GiB, H100, torch 2.6.0.\n! usable cores: 1024 then, \d.*\n~ memory: 1024 MiB then",
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
    assert "Verdict: The CPU binds" in text
    assert re.search(told, text, re.DOTALL)


def test_show_html_writes_a_page_and_apply_kwargs_is_json(
    loader_json: str, result: TuningResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", loader_json, "--html", "page.html"]) == 0
    assert capsys.readouterr().out == "Written to page.html.\n"
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["apply", loader_json, "--to", "kwargs"]) == 0
    assert json.loads(capsys.readouterr().out) == result.best.to_kwargs()


OTHER = LoaderConfig(
    num_workers=2, pin_memory=True, persistent_workers=True, in_order=False, multiprocessing_context="spawn",
    drop_last=True, batch_size=3, device_prefetch=2, consumer_threads=1, sharing_strategy="file_system",
)  # fmt: skip


@pytest.mark.parametrize("config", [LoaderConfig(), OTHER], ids=str)
def test_applied_python_runs(config: LoaderConfig, result: TuningResult) -> None:
    threads, strategy = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    names: dict[str, Any] = {}
    try:
        exec(snippet(replace(result, best=config)), names)
        set_threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert set_threads == (config.consumer_threads or threads)
    batch_size = {} if config.batch_size is None else {"batch_size": config.batch_size}
    assert names["LOADER_ARGUMENTS"] == {**batch_size, **config.to_kwargs()}
    assert len(DataLoader([1, 2, 3], **names["LOADER_ARGUMENTS"])) in (1, 3)


def report(path: Path, **rates: float | None) -> str:
    loaders = [{"name": f"train.py:{name}", "samples_per_s": rate, "wait_share": 0.5} for name, rate in rates.items()]
    path.write_text(f"a warning\n 9/10\r{json.dumps({'verb': 'watch', 'loaders': loaders})}\nbye")
    return str(path)


@pytest.mark.parametrize(
    ("after", "options", "code", "told"),
    [
        (900.0, [], 0, "-10 %"),
        (900.0, ["--fail-if-slower", "5%"], 4, "Slower by more than --fail-if-slower allows: train.py:a"),
        (900.0, ["--json"], 0, '"train.py:a": 0.09999'),
        (900.0, ["--fail-if-slower", "0.2"], 0, "-10 %"),
        (2000.0, ["--fail-if-slower", "5%"], 0, "+100 %"),
        (None, ["--fail-if-slower", "5%"], 0, "-"),
    ],
)
def test_a_slower_loader_is_shown_and_can_fail_a_pipeline(
    after: float | None, options: list[str], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = report(tmp_path / "before.json", a=1000.0), report(tmp_path / "after.json", a=after, b=1.0)
    assert cli.main(["compare", before, now, *options]) == code
    assert told in "".join(capsys.readouterr())


def test_reports_of_different_scripts_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", report(tmp_path / "one.json", a=1.0), report(tmp_path / "other.json", b=1.0)]) == 2
    assert "no loader in common" in capsys.readouterr().err


def test_demo_tunes_its_small_job_within_the_budget_and_writes_the_file(
    folder: Path, tune: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN pictures of which an interrupted run has left all but one
    pictures, make = folder / "pictures", partial(demo.make_jpegs, count=40, size=(80, 60))
    before = {path: path.read_bytes() for path in make(pictures)}
    min(before).unlink()
    monkeypatch.setattr(demo, "cache_folder", lambda: pictures)
    monkeypatch.setattr(demo, "make_jpegs", make)
    assert cli.main(["demo", "--budget", "5s"]) == 0
    # THEN that one is made anew as it was, and the job fits together
    assert {path: path.read_bytes() for path in pictures.iterdir()} == before
    given = tune.call_args.kwargs
    data, model, size = (given[name] for name in ("dataset_or_loader", "model", "batch_size"))
    assert model(next(iter(DataLoader(data, batch_size=size)))[0]).shape == (size, demo.CLASSES)
    assert (given["budget"], given["output"]) == ("5s", "loader.json")
    told = capsys.readouterr().out
    assert all(text in told for text in (tune.return_value.summary[1], "Written to loader.json."))
