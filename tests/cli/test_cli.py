"""The command line as its users meet it: `main(arguments)`, nearly always in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import psutil
import pytest
import torch
from report.example import synthetic_result
from torch.utils.data import DataLoader

import autotune_loader
from autotune_loader import cli, demo
from autotune_loader.cli.app import make_parser
from autotune_loader.cli.doctor import examination
from autotune_loader.machine import nvml
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.machine.nvml import GpuUse
from autotune_loader.tuning.arguments import answers_unknown_arguments
from autotune_loader.values import LoaderConfig, WorkloadError
from autotune_loader.watch.run_plan import say

TRAIN = """
import argparse
import os
import sys

FILE_AT_IMPORT = sys.modules["__main__"].__file__

class Numbers:
    def __getitem__(self, index):
        return index

NUMBERS = Numbers()
make_numbers = lambda: NUMBERS
make_pair = lambda: (NUMBERS, "a model")
make_arguments = lambda: {"data": NUMBERS, "batch_size": 4, "budget": "9s"}
make_mistyped = lambda: {"data": NUMBERS, "batchsize": 4}
make_with = lambda folder: NUMBERS
make_broken = lambda: open_the_files()

def open_the_files():
    raise KeyError("no such split: 'trian'")

def parsed(required):
    import __main__
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=required)
    parser.parse_args()
    assert __main__.NUMBERS is NUMBERS
    assert __main__.__file__ == FILE_AT_IMPORT
    return NUMBERS

make_by_line = lambda: parsed(required=False)
make_by_data = lambda: parsed(required=True)
"""
FILES = {
    "train.py": TRAIN,
    "broken.py": "import a_package_that_is_not_here\n",
    "difflib.py": "make = lambda: [1]\n",
    "jobs/neighbour.py": "ITEMS = [1, 2, 3]",
    "jobs/job.py": "import neighbour, train\nmake = lambda: neighbour.ITEMS\n",
}
REAL_TUNE = autotune_loader.tune


@pytest.fixture(scope="module")
def result():
    return replace(synthetic_result(), machine=inspect_machine().fingerprint())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, result):
    """A folder to be in, with scripts and a result; what is imported from it is forgotten later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "jobs").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    result.save(tmp_path / "loader.json")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def tune(monkeypatch, result):
    """Stands for `tune()`, and answers with a result made beforehand."""
    fake = create_autospec(REAL_TUNE, return_value=result)
    monkeypatch.setattr(autotune_loader, "tune", answers_unknown_arguments(fake))
    return fake


def test_every_command_has_help_with_an_example(capsys):
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("check", "demo", "doctor", "run", "show", "tune", "watch"):
        assert f"\n  autotune-loader {command} " in listed
        assert cli.main([command, "--help"]) == 0
        told = capsys.readouterr().out
        assert f"\n  autotune-loader {command}" in told
        assert max(map(len, [*listed.splitlines(), *told.splitlines()])) <= 80
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"autotune-loader, version {autotune_loader.__version__}\n"


SEE = "See autotune-loader --help."
WRONG = {
    "tun train:make_numbers": "unknown command 'tun'. Did you mean 'tune'?",
    "train.py --epochs 3": "'train.py'. Try autotune-loader watch train.py --epochs 3.",
    "nowhere.py --epochs 3": f"unknown command 'nowhere.py'. {SEE}",
    "--verbose watch train.py": f"unknown option --verbose. Options go after the command. {SEE}",
    "-o x watch train.py": "unknown option -o. Options go after the command.",
    "watch": "required: SCRIPT. See autotune-loader watch --help.",
    "watch -o /dev/null/x.json train.py": "--output='/dev/null/x.json' cannot be written (Not ",
    "watch --json train.py": "is a script. Try --json report.json train.py.",
    "run -o train.py --epochs 3": "is a script. Try --output loader.json train.py.",
    "run --max-workers 0 train.py": "'0' must be an integer >= 1",
    "tune train:make_numbers --max-workers=-1": "'-1' must be an integer >= 0",
    "run --start-with /nope/x.json train.py": "/nope/x.json",
    "watch --fail-if-wait ten train.py": "'ten' must be between 0% and 100%, such as 5%",
    "run --fail-if-wait 110% train.py": "'110%' must be between",
    "run --workers 8 train.py": "unknown option --workers. Did you mean --allow-workers or --max-w",
    "watch --epochs 3 train.py": "--epochs. Options of the script go after its name.",
    "tune train:make_numbers --data /x": "--data. Arguments of the script go after --.",
    "tune train:make_numbers --json": "unknown option --json. Arguments of the script go",
    "tune train:make_numbers --allow x": "invalid choice: 'x' (choose from",
    "doctor now": "unknown option now. See autotune-loader doctor --help for all options.",
    "check --stric": "unknown option --stric. Did you mean --strict?",
    "demo --budget 0": "Error: budget='0' ",
    "tune trian:make_numbers": "there is no module 'trian' in {}. Did you mean train?",
    "tune trian.py:make_numbers": "there is no file 'trian.py' in {}. Did you mean train.py?",
    "tune jobs/jbo.py:make": "there is no file 'jobs/jbo.py' in {}. Did you mean jobs/job.py?",
    "tune nowhere.py:make": "there is no file 'nowhere.py' in {}.\n",
    "tune difflib.py:make": "imported: another module has the name 'difflib'. Rename",
    "tune train.py": "'train.py' does not name a function. Add its name",
    "tune train.py:NUMBERS --storage nowhere://x": "storage",
    "tune train:make_number": "no 'make_number'. Did you mean train:make_numbers?",
    "tune train:nothing_like_it": "Error: train has no 'nothing_like_it'. It has ",
    "tune train:make_with": "missing 1 required positional argument: 'folder'",
    "tune train:make_mistyped": "batchsize=4 is not an argument of tune(). Try batch_size=....",
    "tune train:make_broken": "in open_the_files",
    "tune train.py:make_by_data": "failed. Arguments of the script go after --.",
    "tune broken:make": 'broken.py", line 1',
    "show nowhere.json": "nowhere.json",
    "show train.py --code": "is not a valid loader.json",
    "show loader.json --html train.py/page.html": "--html='train.py/page.html' cannot be",
    "check nowhere.json": "path='nowhere.json' cannot be read",
}


@pytest.mark.parametrize(("line", "told"), WRONG.items(), ids=WRONG)
def test_a_wrong_line_is_answered_with_what_works(line, told, tune, capsys):
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert told.format(Path.cwd()) in captured.err
    assert captured.out == ""
    # AND a traceback is the user's own
    assert not re.search("tune_command.py|importlib", captured.err)


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_is_suggested_parses(line, tune, capsys):
    cli.main(line.split())
    pattern = r"(?:Try|See) autotune-loader (.+?)(?: for all options)?\.$"
    for suggested in re.findall(pattern, capsys.readouterr().err):
        try:
            make_parser()[0].parse_args(suggested.split())
        except SystemExit:  # of --help
            continue


@pytest.mark.parametrize("line", ["show", "tune train:make_numbers"])
def test_bugs_keep_their_traceback(line, tune, monkeypatch):
    broken = tune.side_effect = Mock(side_effect=ValueError("a bug"))
    monkeypatch.setattr(autotune_loader.TuningResult, "report", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(line.split())


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("watch --fail-if-wait 0 train.py", "most_waiting", 0.0),
        ("watch --fail-if-wait 0.05 train.py", "most_waiting", 0.05),
        ("run --fail-if-wait 100% train.py", "most_waiting", 1.0),
        ("run --max-workers 1 train.py", "max_workers", 1),
        ("tune train:make_numbers --max-workers 0", "max_workers", 0),
        ("demo --latency 0", "latency", 0),
    ],
)
def test_the_least_and_the_most_are_taken(line, name, value):
    assert vars(make_parser()[0].parse_args(line.split()))[name] == value


SHAPES = WorkloadError("the first batch failed", "Traceback ...\nRuntimeError: shapes do not fit")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SHAPES, 2, "Traceback ...\nRuntimeError: shapes do not fit\n"),
        (KeyboardInterrupt, 130, "Interrupted.\n"),
    ],
)
def test_what_ends_tune_is_told_with_a_code(error, code, told, tune, capsys):
    tune.side_effect = error
    assert cli.main(["tune", "train:make_numbers"]) == code
    assert capsys.readouterr().err.endswith(told)


TYPED = "--budget=3m --max-workers=4 --output=out.json --allow in_order --allow batch_size"
TYPED += " --trace=trace.json"
TYPED_ARGUMENTS = {"budget": "3m", "max_workers": 4, "output": "out.json"}
TYPED_ARGUMENTS |= {"trace": "trace.json", "allow": ["in_order", "batch_size"]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train:make_numbers", {}),
        ("train.py:make_numbers --quiet", {"progress": False}),
        ("./train.py:NUMBERS", {}),
        ("train.py:make_by_line --budget 9s", {"budget": "9s"}),
        ("train.py:make_by_data --budget 9s -- --data /x", {"budget": "9s"}),
        ("train:make_pair", {"model": "a model"}),
        ("train:make_arguments", {"batch_size": 4, "budget": "9s"}),
        (f"train:make_arguments {TYPED}", {"batch_size": 4, **TYPED_ARGUMENTS}),
        ("jobs/job.py:make", {}),
    ],
)
def test_tune_gets_data_and_options(line, expected, tune):
    process = sys.argv, sys.modules["__main__"]
    assert cli.main(["tune", *line.split()]) == 0
    assert process == (sys.argv, sys.modules["__main__"])
    ((data,), given) = tune.call_args
    assert given == {"output": "loader.json", "progress": True, **expected}
    assert data == [1, 2, 3] if line.startswith("jobs") else type(data).__name__ == "Numbers"


def test_storage_opens_a_study_of_that_name(tune):
    assert cli.main(["tune", "train:NUMBERS", "--storage", "new/study.journal"]) == 0
    assert tune.call_args.kwargs["study"].study_name == "train:NUMBERS"
    assert Path("new/study.journal").exists()


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(tune, result, capsys):
    tune.side_effect = lambda *_, **__: warnings.warn("careful", stacklevel=1) or result
    assert cli.main(["tune", "train:NUMBERS"]) == 0
    assert capsys.readouterr().err == "Warning: careful\n"


@pytest.mark.parametrize(
    ("status", "code"), [("complete", 0), ("undecided", 0), ("fallback", 3), ("partial", 130)]
)
def test_tune_reports_and_tells_by_its_code(status, code, tune, capsys):
    tune.return_value = replace(tune.return_value, status=status)
    assert cli.main(["tune", "train:make_numbers", "-o", "loader.json"]) == code
    text = capsys.readouterr().out
    assert "Bottleneck: CPU." in text
    assert "\nWritten to loader.json. For your training script: autotune-loader show " in text


def test_a_terminal_without_our_characters_has_others(monkeypatch):
    out, err = (TextIOWrapper(BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert cli.main(["watch", "--nothing"]) == 2
    say("a ─ b – c ± é")
    assert (out.errors, err.errors) == ("strict", "strict")  # they are the script's
    assert cli.main(["show"]) == 0
    told = out.buffer.getvalue().decode("ascii")
    assert "\n--------" in told
    assert re.search(r"\d-\d", told)
    assert err.buffer.getvalue().endswith(b"\na - b - c +- ?\n")


def test_a_closed_pipe_is_no_error(monkeypatch):
    # GIVEN a pipe whose reader is gone, as after `| head`
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as out:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["show"]) == 0
        print("more", flush=True)  # THEN what comes at the exit is none, either


FITS = "The settings fit this machine."
OTHER = "The settings were tuned on another machine. Tune again here."
UNKNOWN = "The file does not name the machine that was tuned."
OTHER_MACHINE = Fingerprint(usable_cores=1024, memory_bytes=1 << 30, gpu="H100", torch="2.6.0")
FROM_ANOTHER = (  # what matters comes first
    r"2026-11-26, 1,024 cores, 1 GiB, H100,\s+torch 2.6.0.\n\n"
    r"! usable cores: 1024 when tuned, \d.*\n! GPU: H100 when.*\n~ memory.*\n~ torch: 2.6.0 when"
)


@pytest.mark.parametrize(
    ("tuned_on", "told"),
    [
        ({}, FITS),
        ({"machine": None}, r"15 trials in 24 s.\n\nThe file does not name"),
        ({"machine": OTHER_MACHINE}, FROM_ANOTHER),
    ],
    ids=["the same", "not told", "another"],
)
def test_show_says_whether_this_machine_fits(tuned_on, told, result, capsys):
    replace(result, **tuned_on).save("saved.json")
    assert cli.main(["show", "saved.json"]) == 0
    text = capsys.readouterr().out
    assert "Bottleneck: CPU." in text
    assert re.search(told, text, re.DOTALL)


HERE = inspect_machine().fingerprint()
MORE_CORES = replace(HERE, usable_cores=HERE.usable_cores + 1)
FEWER_CORES = replace(HERE, usable_cores=HERE.usable_cores - 1)


@pytest.mark.parametrize(
    ("tuned_on", "line", "code", "told"),
    [
        (HERE, "check", 0, [FITS]),
        (None, "check --strict", 0, [UNKNOWN]),
        (replace(HERE, gpu=None, dataset="Images[9]"), "check --strict", 0, [FITS]),
        (MORE_CORES, "check", 5, ["! usable cores", OTHER]),
        (FEWER_CORES, "check loader.json", 0, ["~ usable cores", FITS]),
        (FEWER_CORES, "check loader.json --strict", 5, ["~ usable cores", OTHER]),
        (replace(HERE, torch="1.2"), "check", 0, ["~ torch: 1.2 when tuned, 2", FITS]),
        (replace(HERE, torch="1.2"), "check --strict", 5, ["~ torch: 1.2 when tuned, 2", OTHER]),
        (replace(HERE, gpu="NVIDIA T4"), "check", 5, ["! GPU: NVIDIA T4 when", OTHER]),
    ],
)
def test_check_says_by_its_code_what_fits(tuned_on, line, code, told, result, capsys, monkeypatch):
    monkeypatch.setattr("autotune_loader.results.file.visible_gpu", lambda: "none")
    replace(result, machine=tuned_on).save("loader.json")
    assert cli.main(line.split()) == code
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(told)
    assert all(text.startswith(each) for text, each in zip(printed, told, strict=True))


CHECKING = """
import sys
from autotune_loader.cli import main
assert main(["check", "--strict"]) == 0
assert {"torch", "numpy", "optuna"}.isdisjoint(sys.modules)
"""


@pytest.mark.process
def test_check_reads_the_jobs_file_without_torch(folder, monkeypatch):
    (folder / "loader.json").rename(folder / "named.json")
    monkeypatch.setenv("AUTOTUNE_LOADER_CONFIG", "named.json")
    monkeypatch.setenv("PYTHONPATH", str(Path(autotune_loader.__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", CHECKING], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == f"{FITS}\n"


def test_show_html_writes_a_page(capsys):
    assert cli.main(["show", "--html", "new/page.html"]) == 0
    assert capsys.readouterr().out == "Written to new/page.html.\n"
    assert Path("new/page.html").read_text().startswith("<!doctype html>")


OTHER = LoaderConfig(
    num_workers=2, pin_memory=True, persistent_workers=True, in_order=False,
    multiprocessing_context="spawn", batch_size=3, device_prefetch=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "size", "is_shuffled"),
    [(LoaderConfig(), {"batch_size": 32}, True), (OTHER, {"batch_size": 3}, False)],
    ids=str,
)
def test_the_code_of_a_result_runs(config, size, is_shuffled, result, capsys):
    replace(result, best=config, shuffle=is_shuffled).save("saved.json")
    assert cli.main(["show", "saved.json", "--code"]) == 0
    names, code = {}, capsys.readouterr().out
    exec(code, names)
    assert names["loader_arguments"] == {**size, **config.to_kwargs()}
    assert DataLoader([1, 2, 3], **names["loader_arguments"])
    assert ("DevicePrefetcher(loader, 'cuda', depth=2)" in code) == bool(config.device_prefetch)
    order = "shuffle=True" if is_shuffled else "..."
    assert f"# loader = DataLoader(dataset, {order}, **loader_arguments)" in code


def test_the_code_of_an_autoloader_is_one(result, capsys):
    replace(result, found_by="autoloader").save("saved.json")
    assert cli.main(["show", "saved.json", "--code"]) == 0
    names, code = {}, capsys.readouterr().out
    exec(code.replace("# loader", "loader").replace("(dataset", "([1, 2, 3]"), names)
    assert isinstance(names["loader"], autotune_loader.AutoLoader)
    assert names["loader"].config == result.best


@pytest.mark.system  # four processes import torch
def test_the_demo_shows_a_gain_and_leaves_nothing(folder, monkeypatch, capfd):
    mine, scratch = Path("loader.json").read_bytes(), folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(demo, "BEFORE", 64)
    monkeypatch.setattr(demo, "AFTER", 320)
    monkeypatch.setenv("PYTHONPATH", str(Path(autotune_loader.__file__).parents[1]))
    # GIVEN a store that is so slow that workers win on any machine
    assert cli.main(["demo", "--latency", "40", "--budget", "20s"]) == 0
    told = capfd.readouterr()
    assert "1,200 JPEG files from a simulated object store, 40 ms a request." in told.out
    steps = re.findall(r"^\$ autotune-loader (\w+) .*$", told.out, re.MULTILINE)
    assert steps == ["watch", "tune", "watch"]
    pattern = r"Before: ([\d,.]+) samples/s.*: ([\d,.]+) samples/s, ([\d.]+)x faster"
    found = re.search(pattern, told.out).groups()
    before, after, times = (float(each.replace(",", "")) for each in found)
    assert times > 1.5
    assert times == pytest.approx(after / before, rel=0.1)
    assert told.err.count("autotune-loader watch: 1 loader") == 2
    assert list(scratch.iterdir()) == []
    assert Path("loader.json").read_bytes() == mine


POD = {  # two cores and 2.5 GiB, of which 1 GiB is in use
    "proc/self/cgroup": "0::/pod/app\n",
    "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/pod/memory.max": str(5 << 29),
    "sys/fs/cgroup/pod/memory.current": str(1 << 30),
    "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
    "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
}


@pytest.mark.parametrize(
    ("files", "cpus", "environ", "parts"),
    [
        (POD, 64, {}, ["LOW cores:", "2 usable (64 os.cpu_count()", "docker run --cpus",
                       "LOW memory:", "pod/memory.max"]),
        ({}, 64, {"LOCAL_WORLD_SIZE": "32"},
            ["LOW cores:", "2 usable, shared by 32 ranks", "start fewer ranks"]),
        ({}, 64, {"SLURM_CPUS_PER_TASK": "2"}, ["LOW cores:", "sbatch --cpus-per-task"]),
        ({}, 64, {"SLURM_CPUS_PER_TASK": "8"}, ["memory:        unknown"]),  # a fair share
        ({}, 2, {}, ["memory:        unknown"]),  # a small host
    ],
)  # fmt: skip
def test_a_low_limit_is_named(files, cpus, environ, parts, tmp_path, monkeypatch):
    for name, text in {**files, "dev/shm/.keep": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr(os, "process_cpu_count", lambda: cpus, raising=False)  # Python 3.13
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=RuntimeError))
    told = examination(inspect_machine(root=tmp_path, environ=environ))
    assert [part for part in parts if part not in told] == []
    assert ("LOW cores" in told) == ("Too low: " in told) == ("LOW cores:" in parts)


def cores_of(usable, most, host=64, ranks=1):
    limits = [SimpleNamespace(value=host, source="os.cpu_count()")]
    binding = SimpleNamespace(value=most, source="affinity")
    return SimpleNamespace(usable=usable, ranks=ranks, binding=binding, inputs=limits)


ENOUGH = {
    "cores": cores_of(4, 4), "memory": SimpleNamespace(inputs=[]), "memory_budget_bytes": 2 << 30,
    "shm": SimpleNamespace(free_bytes=(64 << 20) + 1, total_bytes=1 << 30), "open_files": 4096,
}  # fmt: skip
FULL_SHM = SimpleNamespace(free_bytes=64 << 20, total_bytes=1 << 30)


@pytest.mark.parametrize(
    ("changes", "low", "told"),
    [
        ({}, "", "4 usable (64 os.cpu_count())"),
        ({"cores": cores_of(3, 3)}, "cores", "taskset"),
        ({"cores": cores_of(3, 5, ranks=2)}, "cores", "3 usable, shared by 2 ranks (64"),
        ({"cores": cores_of(3, 5)}, "cores", "taskset"),
        ({"cores": cores_of(3, 6)}, "cores", "start fewer ranks"),
        ({"cores": cores_of(3, 3, host=6)}, "cores", "taskset"),
        ({"cores": cores_of(3, 3, host=5)}, "", "3 usable (5"),
        ({"memory_budget_bytes": (2 << 30) - 1}, "memory", "docker run --memory=16g"),
        ({"shm": FULL_SHM}, "shared memory", "64 MiB of 1 GiB free"),
        ({"shm": None}, "", "no /dev/shm"),
        ({"open_files": 4095}, "open files", "ulimit -n 65536"),
        ({"open_files": None}, "", "open files: no limit"),
        ({"open_files": 1, "shm": FULL_SHM}, "shared memory, open files", "1 (soft RLIMIT_NOFILE)"),
    ],
)
def test_a_limit_is_low_from_its_bound_on(changes, low, told):
    drawn = examination(SimpleNamespace(**{**ENOUGH, **changes}))
    indents = {len(line) - len(line.lstrip()) for line in drawn.splitlines()}
    assert indents <= {0, 4, 19}
    text = " ".join(drawn.split())
    assert text.endswith(f" Too low: {low}." if low else " No limit is too low.")
    assert text.count("to raise it: ") == text.count("LOW ") == len(low.split(", ")) * bool(low)
    assert told in text


def test_each_gpu_is_told_with_what_nvml_tells(monkeypatch):
    why = "NVML does not tell the utilization of cuda:1: Insufficient Permissions."
    meters = {
        "cuda:0": SimpleNamespace(now=lambda: GpuUse(0.12, 3 << 30), why_none=""),
        "cuda:1": SimpleNamespace(now=GpuUse, why_none=why),
        "cuda:2": SimpleNamespace(now=lambda: GpuUse(0.0), why_none=""),
    }
    monkeypatch.setattr(nvml, "GpuMeter", meters.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: properties)
    text = " ".join(examination(inspect_machine()).split())
    assert "GPUs: cuda:0 NVIDIA H200 (139 GiB), 3 GiB in use, 12% busy; cuda:1" in text
    assert f"cuda:1 NVIDIA H200 (139 GiB): {why[:-1]}; cuda:2" in text
    assert "cuda:2 NVIDIA H200 (139 GiB), 0% busy" in text


def test_a_driver_that_fails_is_no_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", Mock(side_effect=RuntimeError("driver")))
    text = " ".join(examination(inspect_machine()).split())
    assert "GPUs: could not query torch (RuntimeError: driver)" in text


def test_doctor_has_all_for_a_bug_report(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("versions", "cores", "memory", "shared memory", "open files", "start method"):
        assert f"{name}:" in text
    assert "torch " in text
    assert len(text.splitlines()) <= 24
