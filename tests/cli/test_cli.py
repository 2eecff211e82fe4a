"""The command line as its users meet it: `main(arguments)` in this process, and a few runs in one of their own."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report.example import BEST, synthetic_result

import autotune_loader.tuning.tune
from autotune_loader import cli, demo
from autotune_loader.cli.files import snippet
from autotune_loader.cli.tuning import tune_command
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError

COMMANDS = ("apply", "compare", "demo", "doctor", "run", "show", "tune", "watch")

TRAIN = """
class Numbers(list):
    pass

NUMBERS = Numbers()

def make_numbers():
    return NUMBERS

def make_pair():
    return NUMBERS, "a model"

def make_arguments():
    return {"dataset_or_loader": NUMBERS, "batch_size": 4, "budget": "9s"}

def make_mistyped():
    return {"dataset_or_loader": NUMBERS, "batchsize": 4}

def make_nothing():
    pass

def make_with(folder):
    return NUMBERS

def make_broken():
    return open_the_files()

def open_the_files():
    raise KeyError("no such split: 'trian'")

def make_slow():
    raise KeyboardInterrupt
"""


class FakeTune:
    """Stands for `tune()`: remembers its arguments and answers with a result made beforehand, or raises."""

    def __init__(self, result: TuningResult) -> None:
        self.result = result
        self.error: Exception | None = None
        self.arguments: dict[str, Any] = {}

    def __call__(self, dataset_or_loader: Any, model: Any = None, **options: Any) -> TuningResult:
        self.arguments = inspect.signature(REAL).bind(dataset_or_loader, model, **options).arguments
        if self.error is not None:
            raise self.error
        if options.get("output"):
            self.result.save(options["output"])
        return self.result


REAL = autotune_loader.tuning.tune.tune


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return replace(synthetic_result(), fingerprint=inspect_machine().fingerprint())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, with `train.py`; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    files = {
        "train.py": TRAIN,
        "broken.py": "import a_package_that_is_not_here\n",
        "json.py": "def make():\n    return [1]\n",
        "jobs/neighbour.py": "ITEMS = [1, 2, 3]",
        "jobs/job.py": "import neighbour\nimport train\ndef make():\n    return neighbour.ITEMS\n",
    }
    (tmp_path / "jobs").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, result: TuningResult) -> FakeTune:
    fake = FakeTune(result)
    monkeypatch.setattr(autotune_loader.tuning.tune, "tune", fake)
    return fake


@pytest.fixture
def loader_json(folder: Path, result: TuningResult) -> str:
    result.save(folder / "loader.json")
    return "loader.json"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert f"\n  {command} " in capsys.readouterr().out
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
    ],
)
def test_a_wrong_line_is_bad_input_and_answered_with_what_would_work(
    line: str, told: str, tune: FakeTune, loader_json: str, capsys: pytest.CaptureFixture[str]
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
    target: str, own: str, not_theirs: str, tune: FakeTune, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", target]) == 2
    told = capsys.readouterr().err
    assert (own in told, not_theirs in told) == (True, False)


def test_a_workload_that_fails_shows_the_users_traceback(tune: FakeTune, capsys: pytest.CaptureFixture[str]) -> None:
    tune.error = WorkloadError("the first batch failed", "Traceback ...\nRuntimeError: shapes do not fit")
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
def test_tunes_what_a_factory_makes(target: str, expected: dict[str, Any], tune: FakeTune) -> None:
    assert cli.main(["tune", target, "--quiet"]) == 0
    made = {"dataset_or_loader": tune.arguments["dataset_or_loader"], "progress": "off"}
    assert tune.arguments == {"model": None, **made, **expected}
    assert "dataset_or_loader" in expected or type(made["dataset_or_loader"]).__name__ == "Numbers"


def test_options_reach_tune_and_win_over_the_factory(tune: FakeTune) -> None:
    options = {
        "budget": "3m", "max_trials": 7, "max_workers": 4, "max_cores": 2, "max_host_memory": "8GB", "max_shm": "1GiB",
        "tolerance": 0.05, "search": "random", "seed": 3, "isolation": "inline", "storage": "s.journal", "study_name": "n",
        "batch_size": 16, "device": "cpu", "output": "out.json",
    }  # fmt: skip
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags = ["--allow", "in_order", "--allow", "drop_last", "--no-reuse", "--no-stages"]
    assert cli.main(["tune", "train:make_arguments", *typed, *flags]) == 0
    del tune.arguments["dataset_or_loader"], tune.arguments["model"]
    more = {"allow": ("in_order", "drop_last"), "reuse": False, "stages": False, "progress": "on"}
    assert tune.arguments == options | more


def test_every_option_of_tune_that_a_command_line_can_give_has_one() -> None:
    objects = "dataset_or_loader model loss_fn train_step optimizer collate_fn sampler batch_sampler worker_init_fn"
    only_python = {*objects.split(), "generator", "drop_last", "progress", "reuse"}
    names = {parameter.name for parameter in tune_command.params}
    assert set(inspect.signature(REAL).parameters) - only_python <= names


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("undecided", 0), ("fallback", 3), ("partial", 130)])
def test_tune_prints_the_report_and_its_exit_code_tells_how_it_ended(
    status: str, code: int, tune: FakeTune, capsys: pytest.CaptureFixture[str]
) -> None:
    tune.result = replace(tune.result, status=status)
    assert cli.main(["tune", "train:make_numbers", "-o", "loader.json"]) == code
    text = capsys.readouterr().out
    assert "Verdict: Decoding binds" in text
    assert "autotune-loader apply loader.json --to snippet" in text


@pytest.mark.process
def test_json_is_all_there_is_on_stdout(folder: Path, loader_json: str) -> None:
    # GIVEN a factory, a tune() and a child process that all print
    (folder / "noisy.py").write_text(
        "import os, subprocess, autotune_loader.tuning.tune\n"
        "from autotune_loader.results.result import TuningResult\n"
        "def tune(*args, **options):\n"
        "    print('tune prints')\n"
        "    subprocess.run(['echo', 'a child prints'])\n"
        "    os.write(1, b'C prints\\n')\n"
        "    return TuningResult.load('loader.json')\n"
        "autotune_loader.tuning.tune.tune = tune\n"
        "def make():\n"
        "    print('the factory prints')\n"
        "    return [1, 2]\n"
    )
    # WHEN the result is wanted as JSON
    command = [sys.executable, "-P", "-m", "autotune_loader", "tune", "noisy.py:make", "--json"]
    (folder / "json.py").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # THEN stdout is the result, and nothing that was printed is lost
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(Path(loader_json).read_text())
    assert all(text in done.stderr for text in ("the factory prints", "tune prints", "a child prints", "C prints"))


@pytest.mark.parametrize(
    ("cores", "told"), [(None, "This machine is the same in all that matters."), (1024, "! usable cores: 1024 then")]
)
def test_show_prints_the_report_and_whether_this_machine_fits(
    cores: int | None, told: str, result: TuningResult, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = result.fingerprint if cores is None else replace(result.fingerprint, usable_cores=cores)
    replace(result, fingerprint=fingerprint).save("saved.json")
    assert cli.main(["show", "saved.json"]) == 0
    text = capsys.readouterr().out
    assert "Verdict: Decoding binds" in text
    assert told in text


def test_show_html_writes_a_page_and_apply_kwargs_is_json(loader_json: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", loader_json, "--html", "page.html"]) == 0
    assert capsys.readouterr().out == "Written to page.html.\n"
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["apply", loader_json, "--to", "kwargs"]) == 0
    assert json.loads(capsys.readouterr().out) == BEST.to_kwargs()


OTHER = LoaderConfig(
    num_workers=2, pin_memory=True, persistent_workers=True, in_order=False, multiprocessing_context="spawn",
    drop_last=True, batch_size=3, device_prefetch=2, consumer_threads=1, sharing_strategy="file_system",
)  # fmt: skip


@pytest.mark.parametrize("config", [LoaderConfig(), BEST, OTHER], ids=str)
def test_applied_python_runs(config: LoaderConfig, result: TuningResult) -> None:
    text = snippet(replace(result, best=config))
    threads, strategy = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    names: dict[str, Any] = {}
    try:
        exec(compile(text, "snippet", "exec"), names)
        set_threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(strategy)

    assert set_threads == (config.consumer_threads or threads)
    batch_size = {} if config.batch_size is None else {"batch_size": config.batch_size}
    assert names["LOADER_ARGUMENTS"] == {**batch_size, **config.to_kwargs()}
    assert len(torch.utils.data.DataLoader([1, 2, 3], **names["LOADER_ARGUMENTS"])) in (1, 3)


def test_demo_tunes_within_the_budget_and_writes_the_file(
    tune: FakeTune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "demo_factory", lambda: {"dataset_or_loader": [1, 2], "batch_size": 2})
    assert cli.main(["demo", "--budget", "5s"]) == 0
    assert tune.arguments["budget"] == "5s"
    told = capsys.readouterr().out
    assert "It is 3.36x (3.31x to 3.41x) as fast as" in told
    assert "Written to loader.json." in told
    assert Path("loader.json").exists()
