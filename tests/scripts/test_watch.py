"""`watch` on scripts with loaders: what they do and draw is what they do without, and each loader is told of by its line."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from preloaded import PreloadedPython

from autotune_loader import TuningResult

pytestmark = pytest.mark.process
HARD_DEADLINE_S = 60
COMMAND = "import sys\nfrom autotune_loader.cli import main\nsys.exit(main())"
SCRIPT = """
import os, random, sys, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Numbers(Dataset):
    def __init__(self, size=96):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        time.sleep(0.002)
        if index == int(os.environ.get("BAD", -1)):
            raise ValueError(f"no sample {index}")
        return torch.randn(4) + index / self.size + random.random() + np.random.rand()

class Stream(IterableDataset):
    def __iter__(self):
        first = torch.rand(1)  # drawn when the epoch begins, not when its first batch is asked for
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        return iter([first + n for n in range(0 if info is None else info.id, 40, step)])

def train(loader, model, optimizer):
    batches = iter(loader)
    noise = torch.randn(4)
    for x in batches:
        loss = (model(x.float() + noise) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def weights(model):
    return [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]

def state(model):
    return [weights(model), random.random(), np.random.rand(), torch.rand(1).item()]
"""
TRAIN = """
if __name__ == "__main__":
    torch.manual_seed(0); random.seed(0); np.random.seed(0)
    workers = int(sys.argv[1])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=workers, persistent_workers=workers > 0)  # KEPT
    for epoch in range(3):
        train(kept, model, optimizer)
        train(DataLoader(Numbers(32), batch_size=8, num_workers=workers), model, optimizer)  # ANEW
        train(DataLoader(Stream(), batch_size=4, num_workers=workers), model, optimizer)  # STREAM
    print(state(model))
"""


def line_of(script: str, mark: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if f"# {mark}" in line)


class Bench:
    """Runs one script, as it is and by the command line."""

    def __init__(self, python: PreloadedPython, folder: Path) -> None:
        self.python, self.folder = python, folder
        (folder / "command.py").write_text(COMMAND)

    def write(self, body: str) -> str:
        text = SCRIPT + textwrap.dedent(body)
        (self.folder / "train.py").write_text(text)
        return text

    def run(self, *argv: str, **environ: str) -> tuple[int, str]:
        started = self.python.start(*argv, folder=self.folder, environ={"OMP_NUM_THREADS": "1", **environ})
        return started.wait(HARD_DEADLINE_S), started.output

    def command(self, *argv: str, **environ: str) -> tuple[int, str, str]:
        """Exit code, what the script printed, and the report."""
        code, output = self.run("command.py", *argv, **environ)
        printed, _, report = output.partition("\nautotune-loader ")
        return code, printed, report

    def told(self, *argv: str, **environ: str) -> tuple[int, dict[str, Any]]:
        code, output = self.run("command.py", argv[0], "--json", *argv[1:], **environ)
        return code, json.loads(output.splitlines()[-1])


@pytest.fixture
def bench(preloaded: PreloadedPython, tmp_path: Path) -> Bench:
    return Bench(preloaded, tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_and_random_states_are_the_same_bit_for_bit(bench: Bench, workers: int) -> None:
    text = bench.write(TRAIN)
    _, plain = bench.run("train.py", str(workers))

    code, printed, report = bench.command("watch", "train.py", str(workers))

    assert (code, printed) == (0, plain)
    for mark, batches in (
        ("KEPT", "36 batches in 3 epochs"),
        ("ANEW", "12 batches in 3 epochs"),
        ("STREAM", "30 batches in 3 epochs"),
    ):
        block = report.partition(f"train.py:{line_of(text, mark)} ")[2].partition("\n\n")[0]
        assert batches in block, mark
        assert f"num_workers={workers}" in block


def test_what_binds_is_told_with_a_step_to_take(bench: Bench) -> None:
    bench.write("""
        if __name__ == "__main__":
            for x in DataLoader(Numbers(480), batch_size=8):
                time.sleep(0.004)
        """)

    _, told = bench.told("watch", "train.py")

    loader = told["loaders"][0]
    assert loader["binding"] == "wait"
    assert 0.6 < loader["wait_share"] < 0.95
    assert re.match(r"num_workers=\d+, prefetch_factor=\d: .* expected", loader["next_step"])


def test_the_result_of_the_training_loader_is_written(bench: Bench) -> None:
    bench.write("""
        if __name__ == "__main__":
            os.chdir("/")
            for x in DataLoader(Numbers(480), batch_size=8):
                time.sleep(0.004)
            for x in DataLoader(Numbers(8), batch_size=8, num_workers=1):
                pass
        """)

    _, _, report = bench.command("watch", "-o", "loader.json", "--report", "out.html", "train.py")

    result = TuningResult.load(bench.folder / "loader.json")
    page = (bench.folder / "out.html").read_text()
    assert report.count("Written to") == 2
    assert page.startswith("<!DOCTYPE html>")
    assert "Numbers" in page
    assert (result.origin, result.best.num_workers) == ("live", 0)
    assert sorted(each["num_workers"] for each in result.loaders.values()) == [0, 1]


@pytest.mark.parametrize(("share", "code"), [("10%", 4), ("0.99", 0)])
def test_waiting_too_long_has_an_exit_code(bench: Bench, share: str, code: int) -> None:
    bench.write("""
        if __name__ == "__main__":
            for x in DataLoader(Numbers(24), batch_size=8):
                time.sleep(0.01)
        """)

    assert bench.command("watch", "--fail-if-wait", share, "train.py")[0] == code


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("verb", ["watch", "run"])
def test_an_error_of_the_dataset_shows_no_frame_of_ours(bench: Bench, verb: str, workers: int) -> None:
    bench.write(TRAIN)

    code, printed, report = bench.command(verb, "train.py", str(workers), BAD="20")

    assert code == 1
    assert "ValueError: " in printed
    assert "no sample 20" in printed
    frames = re.findall(r'File "([^"]+)"', printed.partition("tests/preloaded.py")[0])
    assert [frame for frame in frames if "/autotune_loader/" in frame] == []
    assert "train.py:" in report


def test_processes_of_the_script_are_reached(bench: Bench) -> None:
    text = bench.write("""
        import multiprocessing, subprocess
        def work():
            for x in DataLoader(Numbers(), batch_size=8):  # CHILD
                pass
        if __name__ == "__main__":
            if sys.argv[1:] == ["as a child"]:
                work()
            elif sys.argv[1] == "exec":
                os.execv(sys.executable, [sys.executable, "train.py", "as a child"])
            elif sys.argv[1] == "subprocess":
                subprocess.run([sys.executable, "train.py", "as a child"], check=True)
            else:
                process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
                process.start()
                process.join()
        """)

    for how in ("fork", "spawn", "subprocess", "exec"):
        code, printed, report = bench.command("watch", "train.py", how, TMPDIR=str(bench.folder))
        assert (code, printed) == (0, "")
        assert list(bench.folder.glob("autotune-loader-*")) == []
        assert report.count("autotune-loader") <= 1, how  # one report, none that there is nothing to tell
        assert f"train.py:{line_of(text, 'CHILD')} " in report, how


def test_spawned_workers_import_main_again(bench: Bench) -> None:
    bench.write("""
        if __name__ == "__main__":
            loader = DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context="spawn")
            print(sum(len(x) for x in loader))
        """)

    for verb in ("watch", "run"):
        code, printed, _ = bench.command(verb, "train.py")
        assert (code, printed) == (0, "96\n")
