"""`pip install --no-deps` beside torch, numpy and psutil: all but tuning works, and tuning says what it needs.

A `sitecustomize` refuses every other distribution of this environment, in each process that is started.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.system

REFUSING = """
import sys

class Refusing:
    def find_spec(name, path=None, target=None):
        if name in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing)
"""
TRAIN = """
import importlib, torch
import autotune_loader
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        for name in ("optuna", "pandas", "msgspec", "cloudpickle", "click"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            raise AssertionError(name)
        return index ** 2

def read(loader):
    print("WHOLE", sorted(int(each) for batch in loader for each in batch) == [i ** 2 for i in range(64)])
"""
SCRIPTS = {
    "auto.py": """
if __name__ == "__main__":
    loader = autotune_loader.AutoLoader(Squares(), batch_size=4, num_workers=2)
    read(loader)
    loader.report(), loader.metrics(), str(loader.result)
    loader.result.save("made/loader.json")
    assert autotune_loader.TuningResult.load("made/loader.json").best == autotune_loader.load_config("made/loader.json")
    read(autotune_loader.AutoLoader(Squares(), batch_size=4, config="made/loader.json"))
""",
    "spawning.py": """
if __name__ == "__main__":
    read(DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="spawn"))
""",
    "enabled.py": """
with autotune_loader.enable("watch", output="made/loader.json"):
    read(DataLoader(Squares(), batch_size=4))
""",
    "tuned.py": "autotune_loader.compare({})",
}
COMMAND = "-m autotune_loader"
HOW_TO_INSTALL = "Install it with: pip install 'optuna' 'msgspec' 'cloudpickle'"


def needed_by(name: str) -> set[str]:
    """A distribution, as far as it is here, and what it needs itself."""
    try:
        asked = [Requirement(each) for each in distribution(name).requires or ()]
    except PackageNotFoundError:
        return set()
    wanted = (
        each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})
    )
    return {canonicalize_name(name)}.union(*map(needed_by, wanted))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    allowed = {"autotune-loader"}.union(*map(needed_by, ("torch", "numpy", "psutil")))
    known = packages_distributions().items()
    refused = {
        module for module, names in known if allowed.isdisjoint(map(canonicalize_name, names))
    }
    assert refused >= {"optuna", "pandas", "msgspec", "cloudpickle", "pynvml"}
    folder = tmp_path_factory.mktemp("light")
    (folder / "sitecustomize.py").write_text(REFUSING.format(refused=sorted(refused)))
    for name, text in SCRIPTS.items():
        (folder / name).write_text(TRAIN + text)
    return folder


@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        ("auto.py", 0, "WHOLE True\nWHOLE True\n"),
        ("enabled.py", 0, "made/loader.json.\n"),
        (
            f"{COMMAND} watch -o new/a/loader.json --json new/b/report.json spawning.py",
            0,
            "new/b/report.json.\n",
        ),
        (f"{COMMAND} run spawning.py", 0, "autotune-loader run: 1 loader"),
        (
            f"{COMMAND} tune spawning.py:Squares",
            2,
            f"Error: tune needs optuna, msgspec, cloudpickle. {HOW_TO_INSTALL}",
        ),
        (
            "tuned.py",
            1,
            f"MissingExtraError: compare needs optuna, msgspec, cloudpickle. {HOW_TO_INSTALL}",
        ),
    ],
)
def test_all_but_tuning_works_with_torch_numpy_and_psutil_alone(typed, code, told, folder):
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])]),
    }
    line = [sys.executable, *typed.split()]
    done = subprocess.run(
        line, cwd=folder, env=environ, text=True, capture_output=True, timeout=90, check=False
    )
    said = done.stdout + done.stderr
    assert (done.returncode, told in said) == (code, True), said
    assert code or "WHOLE True" in done.stdout
