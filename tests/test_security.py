"""Files are data, never code; what only we need is private."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import load_config
from autotune_loader.values.errors import ConfigFileError
from tests.support.bursts import opened, workload

PACKAGE = Path(__file__).resolve().parents[1] / "autotune_loader"
# Where bytes become objects: all of them come from our own processes, through memory, a file without a name or a folder that
# nobody else may enter.
UNPICKLING = {
    "bursts/packing.py": {"loads"},
    "pipeline/by_value.py": {"loads"},
    "autoloader/transport.py": {"loads"},  # between the loop and workers that it has forked
    "watch/launch.py": {"compile", "exec"},  # the script that the user asked to be run
}
NEVER = {"eval", "exec", "compile", "__import__"}
LOADING = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "yaml", "torch"}


def test_nothing_is_unpickled_from_disk_or_run_as_code():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for call in (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = getattr(call, "id", None) or getattr(call, "attr", "")
            module = getattr(getattr(call, "value", None), "id", "")
            is_loaded = module in LOADING and name in {"load", "loads", "open", "Unpickler"}
            if is_loaded or (isinstance(call, ast.Name) and name in NEVER):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
    assert found == UNPICKLING


HOSTILE = [
    {"dataloader_kwargs": {"num_workers": "__import__('os').system('touch owned')"}},
    {"dataloader_kwargs": {"num_workers": 1, "multiprocessing_context": "os.system"}},
    {"dataloader_kwargs": {"num_workers": 1, "collate_fn": "os:system"}},
    {"dataloader_kwargs": {"num_workers": 10**9}},
    {"dataloader_kwargs": {"num_workers": 1, "prefetch_factor": 10**12}},
    {"py/object": "os.system", "__reduce__": ["os.system", ["touch owned"]]},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda changes: json.dumps(changes)[:60])
def test_a_hostile_file_is_refused_or_harmless(tmp_path, monkeypatch, changes):
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
def test_deeply_nested_and_huge_numbers_are_refused(tmp_path, text):
    (tmp_path / "loader.json").write_text(text)
    with pytest.raises(ConfigFileError):
        load_config(tmp_path / "loader.json")


class SpiesOnDescriptors(Dataset[torch.Tensor]):
    """Raises if a program that the dataset starts would get descriptors, were it started without `close_fds`."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        given = [number for number in numbers if number > 2 and os.get_inheritable(number)]
        if given:
            raise LookupError(f"inheritable: {given}")
        return torch.zeros(3)


@pytest.mark.process
def test_the_pipe_between_parent_and_probe_is_private():
    with opened(workload(SpiesOnDescriptors())) as probe:
        # A program started on our side gets nothing either, not even without close_fds.
        ours = probe.probe._child._connection.fileno()
        look = f"import os; print(os.path.exists('/proc/self/fd/{ours}'))"
        seen = subprocess.run([sys.executable, "-c", look], close_fds=False, capture_output=True, text=True, timeout=60)
        assert seen.stdout.strip() == "False"
