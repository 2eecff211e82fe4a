"""A burst changes no file of the user's: what would is refused, ends the run, and is named with what to do."""

from __future__ import annotations

import os
import queue
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.bursts import files
from autotune_loader.bursts.files import refused_path
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload

ROWS = [torch.rand(4) for _ in range(64)]
LEAVE_OUT = "and bursts change no file of yours: leave saving and logging out of the step"
FILL = "and bursts change no file of yours: fill the cache first"


def save(path: Path, _: Any = None) -> None:
    torch.save({"weights": torch.zeros(2)}, str(path))


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("row\n")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a training before, which is the working directory's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "last.pt").write_text("mine")
    (tmp_path / "runs" / "other").write_text("mine too")
    return tmp_path / "runs"


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


class Writer:
    """As TensorBoard's: a thread writes what it is handed, and who hands it waits while the queue is full."""

    def __init__(self, path: Path) -> None:
        self.path, self.queue = path, queue.Queue[str](2)
        threading.Thread(target=self.write, name="writer", daemon=True).start()

    def write(self) -> None:
        with self.path.open("w") as file:
            while True:
                file.write(self.queue.get())


def saving_at(step: int) -> Callable[[Any, Any], None]:
    """A step that saves at one of its calls."""
    done = []

    def train_step(model: Any, batch: Any) -> None:
        done.append(1)
        if len(done) == step:
            save(Path("runs/last.pt"))

    return train_step


def logging_step(model: Any, batch: Any, *, made: list[Writer] = []) -> None:  # noqa: B006 - made once in each process
    if not made:
        made.append(Writer(Path("runs/events")))
    made[0].queue.put("row")


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "torch.save": lambda model, batch: save(Path("runs/last.pt")),
    "append": lambda model, batch: append(Path("runs/last.pt")),
    "unlink": lambda model, batch: Path("runs/last.pt").unlink(),
    "to scratch": lambda model, batch: Path("runs/last.pt").rename(Path(tempfile.gettempdir(), "last.pt")),
    "later": saving_at(100),
    "thread": logging_step,
}


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_changes_files_ends_the_run_and_is_told_what_to_leave_out(step: str, runs: Path) -> None:
    before, begun = contents(runs), time.monotonic()
    side = TrainingSide(train_step=STEPS[step])
    # WHEN it is run THEN it is refused in the words of the user's own script, long before any deadline
    says = pytest.raises(WorkloadError, match=rf"train_step writes runs/\w[\w.]+, {LEAVE_OUT}")
    with says, opened(workload(ROWS, training=side)) as probe:
        for _ in range(20):
            measured(probe.probe)
    assert contents(runs) == before
    assert time.monotonic() - begun < 45.0


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_step_that_waits_for_a_thread_which_a_fork_lacks_ends_the_run(runs: Path) -> None:
    # GIVEN a writer that the script has made
    writer = Writer(runs.parent / "events")
    side = TrainingSide(train_step=lambda model, batch: writer.queue.put("row"))
    says = pytest.raises(WorkloadError, match=r"no thread of this process \(.*writer.*\) runs in a fork.*leave saving")
    writer.queue = queue.Queue(20)
    with says, opened(workload(ROWS, training=side)) as probe:
        measured(probe.probe, plan=BurstPlan(deadline_s=5.0))


class Filling(Dataset[torch.Tensor]):
    """Makes a sample's file where it is not there yet, from the index `first` on."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        self.folder, self.first = folder, first

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.first:
            (self.folder / f"{index}.bin").write_bytes(bytes(8))
        return torch.zeros(2)


def collate_and_save(samples: list[torch.Tensor]) -> torch.Tensor:
    save(Path("runs", "batch.pt"))
    return torch.stack(samples)


@pytest.mark.process
@pytest.mark.parametrize(
    ("make", "parts", "says"),
    [
        (Filling, {"sampler": range(3, 64)}, r"sample 3 writes runs/3\.bin"),
        (lambda folder: Filling(folder, 20), {"sampler": range(64)}, r"sample \d+ writes runs/\d+\.bin"),
        (
            lambda folder: ROWS,
            {"collate_fn": collate_and_save},
            r"collate_fn of .* \d+.* writes runs/batch\.pt",
        ),
    ],
    ids=["first", "later", "collate"],
)
def test_a_dataset_that_fills_a_cache_is_told_to_fill_it_first(
    make: Callable[[Path], Any], parts: dict[str, Any], says: str, runs: Path
) -> None:
    # WHEN it is read, without workers or in them THEN the run ends with the sample and its file
    with pytest.raises(WorkloadError, match=rf"{says}, {FILL}"), opened(workload(make(runs), **parts)) as probe:
        measured(probe.probe, TWO_WORKERS)
    assert sorted(contents(runs)) == ["last.pt", "other"]


class Locked(Filling):
    """Cannot be pickled, so that it is read in a fork; it has a log open."""

    def __init__(self, folder: Path, first: int) -> None:
        super().__init__(folder, first)
        self.lock = threading.Lock()
        self.log = (folder / "log").open("w")

    def close(self) -> None:
        self.log.close()

    def __getitem__(self, index: int) -> torch.Tensor:
        print(index, file=self.log, flush=True)
        return super().__getitem__(index)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_in_a_fork_files_are_as_safe_and_what_is_open_is_written_nowhere(runs: Path) -> None:
    fine, filling = Locked(runs, 64), Locked(runs, 3)
    with opened(workload(fine)) as probe:
        measured(probe.probe, ONE_WORKER)
        measured(probe.probe)
    assert "in forks of this process" in " ".join(probe.notes)
    with pytest.raises(WorkloadError, match=rf"sample \d+ writes runs/\d+\.bin, {FILL}"), opened(workload(filling)):
        pass
    fine.close()
    filling.close()
    assert sorted(contents(runs)) == ["last.pt", "log", "other"]
    assert contents(runs)["log"] == ""


@pytest.mark.process
def test_scratch_caches_and_a_tracker_that_is_off_are_no_trouble(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(runs / "cache"))
    monkeypatch.setenv("WANDB_MODE", "online")
    (runs / "cache").mkdir()

    def step(model: Any, batch: Any) -> None:
        save(Path(tempfile.gettempdir(), "mine.pt"))
        (runs / "cache" / "weights").write_text("downloaded")
        assert os.environ["WANDB_MODE"] == "disabled"
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name.startswith("torchinductor")

    with opened(workload(ROWS, training=TrainingSide(train_step=step))) as probe:
        measured(probe.probe)
    assert (runs / "cache" / "weights").read_text() == "downloaded"
    assert not Path(tempfile.gettempdir(), "mine.pt").exists()


WITHOUT_LANDLOCK = """
import os, sys
sys.path.insert(0, {root!r})
from autotune_loader.machine import elsewhere
elsewhere.LANDLOCK_CREATE = 100_000
from autotune_loader.bursts import files
print(files.confine() == [files.NOT_HELD])
import torch
for change in {changes!r}:
    try:
        exec(change)
        print("done", change)
    except PermissionError as error:
        print("refused", files.refused_path(error))
"""


@pytest.mark.process
def test_without_landlock_python_and_torch_save_are_refused_and_that_is_noted(runs: Path) -> None:
    changes = [
        "open('runs/last.pt', 'w')",
        "torch.save({}, 'runs/last.pt')",
        "os.remove('runs/last.pt')",
        "os.rename('runs/last.pt', 'runs/older')",
        "torch.save({}, os.environ['TMPDIR'] + '/fine')",
        "os.mkdir('runs/more')",
    ]
    root = str(Path(files.__file__).parents[2])
    (runs.parent / "scratch").mkdir()
    script = WITHOUT_LANDLOCK.format(root=root, changes=changes)
    environ = {**os.environ, "TMPDIR": str(runs.parent / "scratch")}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    first, *others = ran.stdout.splitlines()
    assert first == "True"
    assert [line.split()[0] for line in others] == ["refused"] * 4 + ["done", "refused"]
    assert others[1] == "refused runs/last.pt"
    assert contents(runs)["last.pt"] == "mine"


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (PermissionError(13, "Permission denied", "runs/a.csv"), "runs/a.csv"),
        (OSError(18, "Invalid cross-device link", "runs/last.pt"), "runs/last.pt"),
        (RuntimeError("File runs/last.pt cannot be opened."), "runs/last.pt"),
        # h5py, OpenCV, and what a worker's exception has left of it
        (OSError("Unable to create file (unable to open file: name = 'runs/x.h5', errno = 13)"), "runs/x.h5"),
        (RuntimeError('imwrite: can\'t be opened: "runs/x.png"'), "runs/x.png"),
        (PermissionError("Caught PermissionError in DataLoader\n  [Errno 13] Permission denied: 'runs/x'"), "runs/x"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "to a database"),
        # none of ours: a folder that is not writable, a file that is missing, scratch, a plain error
        (PermissionError(13, "Permission denied", "/nowhere/a.csv"), None),
        (FileNotFoundError(2, "No such file or directory", "runs/b.csv"), None),
        (PermissionError(13, "Permission denied", "scratch/c"), None),
        (ValueError("File runs/last.pt is broken"), None),
    ],
)
def test_a_refused_write_is_told_from_other_errors(
    error: Exception, path: str | None, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(runs.parent / "scratch"))
    (runs.parent / "scratch").mkdir()
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert (refused_path(error), refused_path(wrapped)) == (path, path)
