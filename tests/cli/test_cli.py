"""The command line as its users meet it: `main(arguments)` in this process, and a few runs in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.example import BEST, synthetic_result

import autotune_loader.tuning.tune
from autotune_loader import cli
from autotune_loader.cli.files import snippet
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.version import __version__

COMMANDS = ("apply", "compare", "demo", "doctor", "run", "show", "tune", "watch")

TRAIN = """
class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

def make_numbers():
    return Numbers()

def make_pair():
    return Numbers(), "a model"

def make_arguments():
    return {"dataset_or_loader": Numbers(), "batch_size": 4, "budget": "9s"}

def make_mistyped():
    return {"dataset_or_loader": Numbers(), "batchsize": 4}

def make_nothing():
    pass

def make_with(folder):
    return Numbers()

def make_broken():
    return open_the_files()

def open_the_files():
    raise KeyError("no such split: 'trian'")

NUMBERS = Numbers()
"""


class FakeTune:
    """Stands for `tune()`: remembers its arguments and answers with a result made beforehand."""

    def __init__(self, result: TuningResult) -> None:
        self.result = result
        self.arguments: dict[str, Any] = {}

    def __call__(self, dataset_or_loader: Any, model: Any = None, **options: Any) -> TuningResult:
        self.arguments = {"dataset_or_loader": dataset_or_loader, "model": model, **options}
        if options.get("output"):
            self.result.save(options["output"])
        return self.result


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return replace(synthetic_result(), fingerprint=inspect_machine().fingerprint())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, with `train.py`; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "train.py").write_text(TRAIN)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, result: TuningResult) -> FakeTune:
    real = autotune_loader.tuning.tune.tune
    fake = FakeTune(result)
    fake.__signature__ = __import__("inspect").signature(real)
    monkeypatch.setattr(autotune_loader.tuning.tune, "tune", fake)
    return fake


@pytest.fixture
def loader_json(folder: Path, result: TuningResult) -> str:
    result.save(folder / "loader.json")
    return "loader.json"


def run_alone(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune_loader", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


# What a user types first


def test_help_names_every_command_and_how_to_complete_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "_AUTOTUNE_LOADER_COMPLETE=bash_source" in text
    assert "..." not in text.split("Commands:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"\n    autotune-loader {command}" in capsys.readouterr().out


@pytest.mark.process
def test_completion_as_the_help_tells_it() -> None:
    done = run_alone("--help", _AUTOTUNE_LOADER_COMPLETE="bash_source")
    assert "complete -o nosort" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"autotune-loader, version {__version__}\n"


def test_a_mistyped_command_or_option_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tun"]) == 2
    assert "No such command 'tun'" in capsys.readouterr().err
    assert cli.main(["tune", "train:make_numbers", "--buget", "3m"]) == 2
    assert "--budget" in capsys.readouterr().err


@pytest.mark.process
def test_help_imports_neither_torch_nor_what_only_some_commands_need() -> None:
    heavy = ("torch", "optuna", "pandas", "rich", "matplotlib", "psutil", "pynvml", "PIL")
    script = (
        "import sys; from autotune_loader.cli import main; main(['--help']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


# tune


@pytest.mark.parametrize("place", ["train", "train.py", "./train.py"])
def test_tunes_what_a_factory_makes(place: str, tune: FakeTune) -> None:
    assert cli.main(["tune", f"{place}:make_numbers", "--quiet"]) == 0
    assert type(tune.arguments["dataset_or_loader"]).__name__ == "Numbers"
    assert tune.arguments["progress"] == "off"


def test_a_file_in_another_folder_can_import_its_neighbours(folder: Path, tune: FakeTune) -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "neighbour.py").write_text("ITEMS = [1, 2, 3]")
    (folder / "jobs" / "job.py").write_text("import neighbour\nimport train\ndef make():\n    return neighbour.ITEMS\n")
    assert cli.main(["tune", "jobs/job.py:make"]) == 0
    assert tune.arguments["dataset_or_loader"] == [1, 2, 3]


def test_takes_a_pair_a_dict_or_the_object_itself(tune: FakeTune) -> None:
    assert cli.main(["tune", "train:make_pair"]) == 0
    assert tune.arguments["model"] == "a model"
    assert cli.main(["tune", "train:make_arguments"]) == 0
    assert (tune.arguments["batch_size"], tune.arguments["budget"]) == (4, "9s")
    assert cli.main(["tune", "train:NUMBERS"]) == 0
    assert type(tune.arguments["dataset_or_loader"]).__name__ == "Numbers"


def test_options_reach_tune_and_win_over_the_factory(tune: FakeTune) -> None:
    options = "--budget 3m --max-trials 7 --max-workers 4 --max-cores 1.5 --max-host-memory 8GB --max-shm 1GiB --allow in_order"
    options += " --allow drop_last --tolerance 0.05 --search random --seed 3 --isolation inline --storage s.journal"
    options += " --study-name n --no-reuse --no-stages --batch-size 16 --device cpu -o out.json"
    assert cli.main(["tune", "train:make_arguments", *options.split()]) == 0
    del tune.arguments["dataset_or_loader"], tune.arguments["model"]
    assert tune.arguments == {
        "budget": "3m",
        "max_trials": 7,
        "max_workers": 4,
        "max_cores": 2,
        "max_host_memory": "8GB",
        "max_shm": "1GiB",
        "allow": ("in_order", "drop_last"),
        "tolerance": 0.05,
        "search": "random",
        "seed": 3,
        "isolation": "inline",
        "storage": "s.journal",
        "study_name": "n",
        "reuse": False,
        "stages": False,
        "batch_size": 16,
        "device": "cpu",
        "output": "out.json",
        "progress": "on",
    }


def test_every_option_of_tune_that_a_command_line_can_give_has_one() -> None:
    import inspect

    # GIVEN what only Python can pass
    objects = {
        "dataset_or_loader",
        "model",
        "loss_fn",
        "train_step",
        "optimizer",
        "collate_fn",
        "sampler",
        "batch_sampler",
    }
    objects |= {"worker_init_fn", "generator", "drop_last", "progress", "reuse"}
    # THEN every other parameter is an option
    from autotune_loader.cli.tuning import tune_command

    names = {parameter.name for parameter in tune_command.params}
    assert set(inspect.signature(autotune_loader.tuning.tune.tune).parameters) - objects <= names


def test_prints_the_report_and_what_to_do_next(tune: FakeTune, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "train:make_numbers", "-o", "loader.json"]) == 0
    text = capsys.readouterr().out
    assert "Verdict: Decoding binds" in text
    assert "autotune-loader apply loader.json --to snippet" in text


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("undecided", 0), ("fallback", 3), ("partial", 130)])
def test_exit_code_tells_how_it_ended(status: str, code: int, tune: FakeTune) -> None:
    tune.result = replace(tune.result, status=status)
    assert cli.main(["tune", "train:make_numbers"]) == code


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
    done = run_alone("tune", "noisy.py:make", "--json")
    # THEN stdout is the result, and nothing that was printed is lost
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(Path(loader_json).read_text())
    assert all(text in done.stderr for text in ("the factory prints", "tune prints", "a child prints", "C prints"))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("train", "names neither a factory nor a script; train.py:make_loader"),
        ("trian:make_numbers", "there is no module 'trian'"),
        ("trian.py:make_numbers", "there is no file 'trian.py'"),
        ("train:make_number", "train has no 'make_number': it has 'Numbers', 'make_numbers'"),
        ("train:make_number", "did you mean 'make_numbers'?"),
        (
            "train:make_with",
            "train:make_with is called without arguments, and that fails: ",
        ),
        ("train:make_nothing", "train:make_nothing gives None; it has to give a dataset"),
        ("train:make_mistyped", "'batchsize', which tune() does not take; 'batch_size' would work"),
    ],
)
def test_a_wrong_factory_is_answered_with_what_would_work(
    target: str, told: str, tune: FakeTune, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", target]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("Error: ")
    assert told in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_an_exception_of_the_factory_is_shown_as_the_users_own(
    tune: FakeTune, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "train:make_broken"]) == 2
    told = capsys.readouterr().err
    assert "in open_the_files" in told
    assert "KeyError: \"no such split: 'trian'\"" in told
    assert "factories.py" not in told


def test_a_module_that_fails_to_import_is_shown_as_the_users_own(
    folder: Path, tune: FakeTune, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("import a_package_that_is_not_here\n")
    assert cli.main(["tune", "broken:make"]) == 2
    told = capsys.readouterr().err
    assert "No module named 'a_package_that_is_not_here'" in told
    assert "broken.py" in told
    assert "importlib" not in told


def test_a_workload_that_fails_shows_the_users_traceback(
    monkeypatch: pytest.MonkeyPatch, tune: FakeTune, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> TuningResult:
        raise WorkloadError("the first batch failed", "Traceback ...\nRuntimeError: shapes do not fit")

    fail.__signature__ = tune.__signature__
    monkeypatch.setattr(autotune_loader.tuning.tune, "tune", fail)
    assert cli.main(["tune", "train:make_numbers"]) == 2
    assert capsys.readouterr().err.endswith("Traceback ...\nRuntimeError: shapes do not fit\n")


def test_ctrl_c_before_anything_was_found_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "slow.py").write_text("def make():\n    raise KeyboardInterrupt\n")
    assert cli.main(["tune", "slow:make"]) == 130
    assert capsys.readouterr().err.strip() == "Interrupted."


def test_traceback_option_shows_our_own(tune: FakeTune) -> None:
    with pytest.raises(ValueError, match="no module 'trian'"):
        cli.main(["--traceback", "tune", "trian:make"])


# show, apply


def test_show_prints_report_and_machines_side_by_side(loader_json: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", loader_json]) == 0
    text = capsys.readouterr().out
    assert "Verdict: Decoding binds" in text
    assert "tuned on" in text
    assert "This machine is the same in all that matters." in text


def test_show_marks_what_is_different_here(
    folder: Path, result: TuningResult, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a file from a machine with more cores
    other = replace(result.fingerprint, usable_cores=1024)
    replace(result, fingerprint=other).save("big.json")
    # WHEN it is shown here
    assert cli.main(["show", "big.json"]) == 0
    # THEN the row is marked, and a sentence says why it matters
    text = capsys.readouterr().out
    assert "!  usable cores" in text
    assert "! usable cores: 1024 then" in text


@pytest.mark.parametrize("command", ["show", "apply"])
def test_a_missing_or_broken_file_is_bad_input(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
    (folder / "broken.json").write_text("{")
    assert cli.main([command, "broken.json"]) == 2
    assert "is not a valid loader.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "code", "told"), [("page.html", 0, "Written to page.html."), ("no/page.html", 2, "--html=")]
)
def test_show_html_writes_a_page(
    page: str, code: int, told: str, loader_json: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", loader_json, "--html", page]) == code
    assert told in "".join(capsys.readouterr())
    assert code or Path(page).read_text().startswith("<!DOCTYPE html>")


def apply(form: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["apply", "loader.json", "--to", form]) == 0
    return capsys.readouterr().out


def test_apply_kwargs_is_json(loader_json: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(apply("kwargs", capsys)) == BEST.to_kwargs()


CONFIGS = [
    LoaderConfig(),
    BEST,
    LoaderConfig(
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
        in_order=False,
        multiprocessing_context="spawn",
        drop_last=True,
        batch_size=3,
        device_prefetch=2,
        consumer_threads=1,
        sharing_strategy="file_system",
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_applied_python_runs(config: LoaderConfig, result: TuningResult, tmp_path: Path) -> None:
    import torch

    # GIVEN the text, and torch as it is
    text = snippet(replace(result, best=config))
    threads, strategy = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    names: dict[str, Any] = {}
    # WHEN it is run
    try:
        exec(compile(text, "snippet", "exec"), names)
        set_threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(strategy)
    # THEN it names the configuration
    assert set_threads == (config.consumer_threads or threads)
    batch_size = {} if config.batch_size is None else {"batch_size": config.batch_size}
    assert names["LOADER_ARGUMENTS"] == {**batch_size, **config.to_kwargs()}


def test_the_snippets_loader_loads(result: TuningResult) -> None:
    names: dict[str, Any] = {}
    exec(snippet(replace(result, best=LoaderConfig(num_workers=0))), names)
    assert [batch.tolist() for batch in names["make_loader"]([1, 2, 3], batch_size=2)] == [[1, 2], [3]]


# demo


def test_demo_tunes_prints_and_lets_a_second_process_train(
    tune: FakeTune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    from autotune_loader import demo
    from autotune_loader.cli import demonstration

    # GIVEN a workload that is there at once, and a second process that only says that it was asked
    asked: list[str] = []
    monkeypatch.setattr(demo, "demo_factory", lambda: {"dataset_or_loader": [1, 2], "batch_size": 2})
    monkeypatch.setattr(demonstration, "run_training_job", lambda path: asked.append(path) or 0)
    # WHEN the demo runs
    assert cli.main(["demo", "--budget", "5s"]) == 0
    # THEN it tuned within the budget, printed the paired speed-up, and wrote the file that the second process was given
    assert tune.arguments["budget"] == "5s"
    told = capsys.readouterr().out
    assert "Speed-up: 3.36x (3.31x to 3.41x)" in told
    assert asked == ["loader.json"]
    assert (folder / "loader.json").exists()


def test_demo_that_found_nothing_trains_nothing(tune: FakeTune, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune_loader import demo

    monkeypatch.setattr(demo, "demo_factory", lambda: {"dataset_or_loader": [1, 2]})
    tune.result = replace(tune.result, status="fallback")
    assert cli.main(["demo"]) == 3
