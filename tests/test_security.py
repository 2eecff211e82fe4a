"""Files are data, never code; what only we need is private."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import PreloadedPython
from torch.utils.data import Dataset

from autotune_loader import load_config, tune
from autotune_loader.tuning import study
from autotune_loader.tuning.study import open_database
from autotune_loader.values.errors import ConfigFileError, MissingExtraError
from tests.support.bursts import opened, workload

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autotune_loader"
# Where bytes become objects: all of them come from our own processes, through memory, a file without a name or a folder that
# nobody else may enter.
UNPICKLING = {
    "bursts/packing.py": {"loads"},
    "pipeline/by_value.py": {"loads"},
    "autoloader/transport.py": {"loads"},  # between the loop and workers that it has forked
    "watch/launch.py": {"compile", "exec"},  # the script that the user asked to be run
}
NEVER = {"eval", "exec", "compile", "__import__"}


def calls(path: Path) -> list[tuple[str, str]]:
    """Module (or nothing) and name of every plain call in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.append(("", node.func.id))
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                found.append((node.func.value.id, node.func.attr))
    return found


def test_nothing_is_unpickled_from_disk_or_run_as_code() -> None:
    loading = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "yaml", "torch"}
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for module, name in calls(path):
            if (module in loading and name in {"load", "loads", "open", "Unpickler"}) or (not module and name in NEVER):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)

    assert found == UNPICKLING


HOSTILE: list[dict[str, Any]] = [
    {"dataloader_kwargs": {"num_workers": "__import__('os').system('touch owned')"}},
    {"dataloader_kwargs": {"num_workers": 1, "multiprocessing_context": "os.system"}},
    {"dataloader_kwargs": {"num_workers": 1, "collate_fn": "os:system"}},
    {"dataloader_kwargs": {"num_workers": 10**9}},
    {"dataloader_kwargs": {"num_workers": 1, "prefetch_factor": 10**12}},
    {"py/object": "os.system", "__reduce__": ["os.system", ["touch owned"]]},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda changes: json.dumps(changes)[:60])
def test_a_hostile_file_is_refused_or_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "loader.json"
    path.write_text(json.dumps({"schema_version": "1.0", "status": "complete", **changes}))
    try:
        kwargs = load_config(path).to_kwargs()
    except ConfigFileError:
        kwargs = {}
    assert kwargs.get("num_workers", 0) in range(10_000)
    assert kwargs.keys().isdisjoint({"collate_fn", "worker_init_fn", "dataset"})
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": 1e999}', '{"dataloader_kwargs": 1' + "0" * 9999])
def test_deeply_nested_and_huge_numbers_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "loader.json").write_text(text)
    with pytest.raises(ConfigFileError):
        load_config(tmp_path / "loader.json")


def test_the_database_of_a_run_is_private(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(os.umask, os.umask(0)))
    open_database(f"sqlite:///{tmp_path}/study.db").engine.dispose()
    assert stat.S_IMODE((tmp_path / "study.db").stat().st_mode) == 0o600


class SpiesOnDescriptors(Dataset[torch.Tensor]):
    """Tells which descriptors a program that the dataset starts would get, were it started without `close_fds`."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        given = [number for number in numbers if number > 2 and os.get_inheritable(number)]
        if given:
            raise LookupError(f"inheritable: {given}")
        return torch.zeros(3)


@pytest.mark.process
def test_the_pipe_between_parent_and_probe_is_private() -> None:
    with opened(workload(SpiesOnDescriptors())) as probe:  # the dataset raises if it finds anything
        # A program started on our side gets nothing either, not even without close_fds.
        child = probe.probe._child
        ours = (child._connection.fileno(), *child._ends)
        look = f"import os; print([n for n in {ours} if os.path.exists(f'/proc/self/fd/{{n}}')])"
        seen = subprocess.run([sys.executable, "-c", look], close_fds=False, capture_output=True, text=True, timeout=60)
        assert seen.stdout.strip() == "[]"


# A job that tells its token wherever user code can tell something: in samples that fail in workers, on stderr before the
# process dies, in what cannot be pickled, in the very first batch. The URL of its storage carries another one.
TELLTALE = """
import logging, os, sys, traceback, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset, get_worker_info
from autotune_loader import TuningResult, tune
from autotune_loader.report.page import page_of

logging.basicConfig(level=logging.DEBUG)

class Telltale(Dataset):
    def __init__(self, where):
        self.where = where
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.where == "worker" and get_worker_info() is not None or self.where == "main":
            raise LookupError(f"no access for {os.environ['HF_TOKEN']}")
        return torch.zeros(2)

def attempt(name, **options):
    try:
        loader = DataLoader(Telltale(name), batch_size=4, num_workers=int(name == "worker"))
        result = tune(loader, progress=True, output=f"{name}.json", budget=2, max_workers=1,
                      max_trials=1, **options)
    except Exception:
        traceback.print_exc()
        return
    print(result.report(), result)
    Path(f"{name}.html").write_text(page_of(TuningResult.load(f"{name}.json")))

for name in ("worker", "main"):
    attempt(name)
attempt("fine", storage=sys.argv[1])
"""


@pytest.mark.process
def test_no_secret_is_in_any_output_log_file_or_report(tmp_path: Path, preloaded: PreloadedPython) -> None:
    secret, folder = "hf_planted4711", tmp_path / "run"
    folder.mkdir()
    (tmp_path / "job.py").write_text(TELLTALE)
    environ = {"PYTHONPATH": str(ROOT), "HF_TOKEN": secret, "AUTOTUNE_LOADER_CACHE": str(folder / "cache")}
    run = preloaded.start(str(tmp_path / "job.py"), "nodb://me:swordfish@host/db", folder=folder, environ=environ)
    assert run.wait(timeout=110) == 0, run.output

    files = [path for path in folder.rglob("*") if path.is_file()]
    told = "\n".join([run.output, *(path.read_text(errors="replace") for path in files)])
    assert "no access for ***" in told
    assert {"worker.json", "worker.html"} <= {path.name for path in files}
    assert [line for line in told.splitlines() if secret in line or "swordfish" in line] == []


JOURNAL = r"cannot be opened \(.*\); storage='study.journal' would work"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nodb://me:swordfish@host/db", "would work|pip install"),
        ("postgresql://me:swordfish@host:port/db", "would work|pip install"),
        ("://me:swordfish@host", "would work|pip install"),
        ("postgresql+nodriver://me:swo:rd@fish@host/db", "would work|pip install"),
        ("sqlite:////nowhere/study.db", JOURNAL),
        ("postgresql+psycopg://me:sword@fish@localhost:1/db", JOURNAL),
    ],
)
def test_a_storage_that_cannot_be_opened_is_told_soon_and_without_its_password(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "psycopg" in url:
        pytest.importorskip("psycopg")
    monkeypatch.setattr(study, "PAUSES_S", ())
    with pytest.raises((ValueError, MissingExtraError), match=says) as caught:
        open_database(url)
    told = "".join(traceback.format_exception(caught.value))
    assert "fish" not in told.replace(url, "")  # a traceback shows the line of this test


@pytest.mark.parametrize("storage", ["me:swordfish@host/db", "postgres//me:swordfish@host/db"])
def test_a_url_without_its_scheme_makes_no_file_that_is_named_by_a_password(storage: str) -> None:
    with pytest.raises(ValueError, match=r"no URL without '://'.*user:password@host/db' would work") as caught:
        tune([torch.zeros(3)] * 8, batch_size=4, storage=storage)
    assert "fish" not in str(caught.value)
