"""A burst changes no file of the user's: what would is refused, ends the run, and is named with
what to do."""

import contextlib
import importlib
import mmap
import os
import queue
import sqlite3
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.bursts import files
from autotune_loader.bursts.files import link_temporary_files, refused_path
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import BurstPlan, WorkloadError
from tests.support.bursts import ALONE, TWO_WORKERS, Made, run, workload

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
ROWS = [torch.rand(4) for _ in range(64)]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of a training before, which is the working directory's."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "scratch"):
        Path(folder).mkdir()
    for name in ("runs/last.pt", "runs/other"):
        Path(name).write_text("mine")
    return tmp_path / "runs"


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def save(path="runs/last.pt"):
    torch.save({"weights": torch.zeros(2)}, path)


def writer(path, size=2):
    """The queue of a thread as TensorBoard's, which writes what is put there; who puts waits while
    the queue is full."""

    def write():
        with open(path, "w") as file:  # noqa: PTH123
            while True:
                file.write(rows.get())

    rows = queue.Queue(size)
    threading.Thread(target=write, name="writer", daemon=True).start()
    return rows


class Filling(Dataset):
    """Makes a sample's file from the index `first` on; where it has a lock it cannot be pickled and
    is read in a fork."""

    def __init__(self, folder, first=0, is_locked=False):
        self.folder, self.first, self.log = folder, first, None
        if is_locked:
            self.lock, self.log = threading.Lock(), (folder / "log").open("w")

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.log is not None:
            print(index, file=self.log, flush=True)
        if index >= self.first:
            (self.folder / f"{index}.bin").write_bytes(bytes(8))
        return torch.zeros(2)


def saving_collate(samples):
    save("runs/batch.pt")
    return torch.stack(samples)


def stepping(act):
    return workload(ROWS, training=TrainingSide(train_step=lambda model, batch: act()))


def saving_at(step, done=[]):  # noqa: B006 - counts the calls in each process
    done.append(1)
    if len(done) == step:
        save()


def logging(made=[]):  # noqa: B006 - made once in each process
    made[:] = made or [writer("runs/events")]
    made[0].put("row")


NO = "but trials do not change your files"
STEP = rf"train_step writes runs/\w[\w.]+, {NO}: leave saving and logging out of the step"
FILL = rf"writes runs/\w+\.\w+, {NO}: fill the cache first"
SAMPLE, COLLATE = rf"sample \d+ {FILL}", rf"collate_fn of .* \d+.* {FILL}"
CHANGES = {
    "torch.save": (lambda runs: stepping(save), ALONE, STEP),
    "a later step": (lambda runs: stepping(lambda: saving_at(100)), ALONE, STEP),
    "a thread": (lambda runs: stepping(logging), ALONE, STEP),
    "the first sample": (lambda runs: workload(Filling(runs), sampler=range(3, 64)), ALONE, SAMPLE),
    "a worker": (lambda runs: workload(Filling(runs, 20), sampler=range(64)), TWO_WORKERS, SAMPLE),
    "collate": (lambda runs: workload(ROWS, collate_fn=saving_collate), ALONE, COLLATE),
    "a fork": (lambda runs: workload(Filling(runs, 3, is_locked=True)), ALONE, SAMPLE),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.timeout(60)  # long before any deadline
@pytest.mark.parametrize(
    "change",
    [*[*CHANGES][:3], *(pytest.param(kind, marks=pytest.mark.system) for kind in [*CHANGES][3:])],
)
def test_what_changes_files_ends_the_run(change, runs):
    make, config, says = CHANGES[change]
    job, before = make(runs), contents(runs)
    # WHEN it is run THEN it is refused in the words of the user's own script
    with pytest.raises(WorkloadError, match=says):
        run(job, *[config] * 20)
    assert contents(runs) == before
    if change == "a fork":  # what was open there has been written nowhere
        job.data.dataset.log.close()


def mapped():
    return mmap.mmap(os.open("runs/last.pt", os.O_RDWR), 0)


def executed(name, command):
    return sqlite3.connect(name).execute(command)


OPEN = rf"runs/last\.pt, or opens it as if to, {NO[:10]}.*is to be opened for reading \(mode=\"r\""
ROW = r"changes a database.*immutable=1"
OPENED = {
    "for a map": (mapped, OPEN),
    "h5py": (lambda: importlib.import_module("h5py").File("runs/last.pt", "r+"), OPEN),
    "a row": (lambda: executed("wal.db", "INSERT INTO t VALUES (2)"), ROW),
    "a new database": (lambda: executed("new.db", "CREATE TABLE t (x)"), ROW),
}


@pytest.mark.process
@pytest.mark.parametrize(
    "what",
    [*[*OPENED][:2], *(pytest.param(kind, marks=pytest.mark.system) for kind in [*OPENED][2:])],
)
def test_what_is_opened_for_writing_is_told(what, runs, databases):
    if what == "h5py":
        pytest.importorskip("h5py")
    act, says = OPENED[what]
    before = contents(runs)
    with pytest.raises(WorkloadError, match=says) as raised:
        run(workload(Made(lambda index: act() and torch.zeros(2))), ALONE)
    assert "fill the cache" not in str(raised.value)
    assert "training would fail" not in str(raised.value)
    assert contents(runs) == before


@pytest.fixture
def databases(runs):
    """Two in WAL mode; changes of the second, which is open, lie beside it."""
    filled = "PRAGMA journal_mode=WAL; CREATE TABLE t (x); INSERT INTO t VALUES (1);"
    with contextlib.ExitStack() as held:
        for name in ("wal.db", "open.db"):
            connection = sqlite3.connect(name)
            connection.executescript(filled)
            if name == "wal.db":
                connection.close()
            else:
                held.callback(connection.close)
        yield


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.system)])
def test_what_is_only_read_is_read(method, runs, databases):
    """However it is opened."""

    def sample(index):
        for name in ("wal.db", "file:wal.db?mode=ro", "open.db"):
            database = sqlite3.connect(name, 5.0, uri=name.startswith("file:"))
            with contextlib.closing(database) as connection:
                assert connection.execute("SELECT x FROM t").fetchall() == [(1,)]
        assert bytes(np.memmap("runs/last.pt", shape=4)) == b"mine"
        rows = np.memmap("runs/last.pt")
        rows[0] = 0
        rows.flush()
        return torch.tensor(np.array(rows))

    def held():
        return {path.name: path.read_bytes() for path in runs.parent.glob("*.db")}

    before = held()
    run(workload(Made(sample), multiprocessing_context=method), ALONE, TWO_WORKERS)
    assert held() == before
    assert contents(runs)["last.pt"] == "mine"


@pytest.mark.process
def test_what_is_in_the_temporary_folder_stays(runs, monkeypatch):
    (runs / "features").mkdir()
    (runs / "features/1.npy").write_text("one")
    monkeypatch.setenv("TMPDIR", str(runs))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def reading(index):
        folder = Path(tempfile.gettempdir())
        assert (folder / "last.pt").read_text() == "mine"
        assert (folder / "features/1.npy").read_text() == "one"
        (folder / "features/2.npy").write_text("two")
        return torch.zeros(2)

    def writing(index):
        Path(tempfile.gettempdir(), "last.pt").write_text("theirs")

    # THEN it is found there, and what changes it is refused
    run(workload(Made(reading)), ALONE)
    with pytest.raises(WorkloadError, match=r"changes runs/last\.pt, or opens it"):
        run(workload(Made(writing)), ALONE)
    assert contents(runs) == {"last.pt": "mine", "other": "mine"}
    assert contents(runs / "features") == {"1.npy": "one"}


def test_a_folder_of_many_files_is_linked_whole(runs, monkeypatch):
    def links(folder):
        return {path.name: path.is_symlink() for path in folder.iterdir()}

    for name in ("large", "large/inner", "small", "autotune-loader-x"):
        (runs / name).mkdir()
    for at in range(6):
        (runs / f"large/{at}").touch()
    (runs / "small/1").write_text("one")
    (runs / "small/lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(runs))
    monkeypatch.setattr(files, "MOST_LINKS", 6)
    scratch = runs.parent / "scratch"
    link_temporary_files(str(scratch))
    assert links(scratch) == {"last.pt": True, "other": True, "large": True, "small": False}
    assert links(scratch / "small") == {"1": True, "lock": False}


@pytest.mark.system
@pytest.mark.process
def test_a_step_that_waits_for_a_thread_ends(runs):
    """Which a fork lacks."""
    rows = writer("scratch/events", size=20)  # the script's own
    says = r"Threads of this process \(.*writer.*\) do not run in a fork.*leave saving"
    with pytest.raises(WorkloadError, match=says):
        run(stepping(lambda: rows.put("row")), ALONE, plan=BurstPlan(deadline_s=1.0))


@pytest.mark.process
def test_scratch_caches_and_trackers_are_no_trouble(runs, monkeypatch):
    # GIVEN two caches that are there, of which a variable names one, and others that are not
    home = runs / "home"
    (home / ".nv").mkdir(parents=True)
    for name, value in {"HOME": str(home), "HF_HOME": str(runs), "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def step():
        save(tempfile.gettempdir() + "/mine.pt")
        (runs / "weights").write_text("downloaded")
        assert not {"CUDA_CACHE_PATH", "HF_HUB_CACHE"} & os.environ.keys()
        for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
            Path(os.environ[name], "kernels").mkdir(parents=True, exist_ok=True)
        assert os.environ["WANDB_MODE"] == "disabled"
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name.startswith("torchinductor")

    run(stepping(step), ALONE)
    # THEN what is there has been used, and the others were made in scratch, which is gone
    assert contents(runs)["weights"] == "downloaded"
    assert [each.name for each in home.iterdir()] == [".nv"]
    assert not Path(tempfile.gettempdir(), "mine.pt").exists()


WITHOUT_LANDLOCK = """
import os, shutil, torch
from autotune_loader.bursts import files
from autotune_loader.machine import elsewhere
elsewhere.LANDLOCK_CREATE = 100_000
assert files.confine() == [files.NOT_HELD]
for change in (
    "open('runs/last.pt', 'w')", "torch.save({}, 'runs/last.pt')", "os.remove('runs/last.pt')",
    "os.rename('runs/last.pt', 'runs/older')", "os.mkdir('runs/more')",
    "os.replace('scratch/mine', 'runs/last.pt')", "torch.save({}, 'scratch/fine')",
    "os.makedirs('scratch/a/b'); shutil.rmtree('scratch/a')",
):
    try:
        exec(change)
        print("done")
    except PermissionError as error:
        print(files.refused_path(error))
"""


@pytest.mark.process
def test_without_landlock_python_is_refused(runs, preloaded):
    """And that is noted."""
    (runs.parent / "scratch/mine").touch()
    (runs.parent / "job.py").write_text(WITHOUT_LANDLOCK)
    environ = {"TMPDIR": str(runs.parent / "scratch")}
    job = preloaded.start("job.py", folder=runs.parent, environ=environ)
    assert job.wait(timeout=60) == 0, job.output
    # Behind these torch 2.6 cannot remove a folder that it made while it was preloaded.
    *refused, saved, removed = job.output.splitlines()[:8]
    assert refused == [*["runs/last.pt"] * 4, "runs/more", "runs/last.pt"]
    assert saved == removed == "done"
    assert contents(runs)["last.pt"] == "mine"


H5PY = "Unable to create file (unable to open file: name = 'runs/x.h5', errno = 13)"
OF_WORKER = "Caught PermissionError in DataLoader\n  [Errno 13] Permission denied: 'runs/x'"
READ_ONLY, CANNOT_OPEN = "attempt to write a readonly database", "unable to open database file"


@pytest.mark.parametrize(("error", "path"), [
    (PermissionError(13, "Permission denied", "runs/a.csv"), "runs/a.csv"),
    (OSError(18, "Invalid cross-device link", "runs/last.pt"), "runs/last.pt"),
    (RuntimeError("File runs/last.pt cannot be opened."), "runs/last.pt"),
    (OSError(H5PY), "runs/x.h5"),
    (RuntimeError('imwrite: can\'t be opened: "runs/x.png"'), "runs/x.png"),
    (PermissionError(OF_WORKER), "runs/x"),
    (sqlite3.OperationalError(READ_ONLY), "a database"),
    (sqlite3.OperationalError(CANNOT_OPEN), "a database"),
    (RuntimeError("lmdb.Error: runs/rows.lmdb: Permission denied"), "runs/rows.lmdb"),
    # none of ours: a folder that is not writable, a missing file, scratch, a plain error
    (PermissionError(13, "Permission denied", "/nowhere/a.csv"), None),
    (FileNotFoundError(2, "No such file or directory", "runs/b.csv"), None),
    (PermissionError(13, "Permission denied", "scratch/c"), None),
    (ValueError("File runs/last.pt is broken"), None),
])  # fmt: skip
def test_a_refused_write_is_told_from_other_errors(error, path, runs, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(runs.parent / "scratch"))
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert refused_path(error) == path
    assert refused_path(wrapped) == path
