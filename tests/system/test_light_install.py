"""`pip install autotune-loader` without an extra: all but tuning works.

A module refuses every other distribution of this environment, and forgets what is imported already.
"""

import functools
import os
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.bench import COMMAND, Bench

pytestmark = pytest.mark.system

REFUSING = """
import sys

class Refusing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in [*sys.modules]:
    if name.partition(".")[0] in {forgotten}:
        del sys.modules[name]
sys.meta_path.insert(0, Refusing)
"""
HEAD = """
import refusing
import importlib.util, torch
import autotune_loader
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        for name in {needed}:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            raise AssertionError(name)
        return index ** 2

def read(loader):
    seen = sorted(int(each) for batch in loader for each in batch)
    print("WHOLE", seen == [index ** 2 for index in range(64)])
"""
AUTO = """
loader = autotune_loader.AutoLoader(Squares(), batch_size=4, num_workers=2)
read(loader)
loader.report(), loader.metrics(), str(loader.result)
loader.result.save("made/loader.json")
import warnings
warnings.simplefilter("ignore")  # these are AutoLoader's settings
found = autotune_loader.load_config("made/loader.json")
assert autotune_loader.TuningResult.load("made/loader.json").best == found
read(autotune_loader.AutoLoader(Squares(), batch_size=4, config="made/loader.json"))
"""
TUNED = """
import time

class Waiting(Squares):
    def __len__(self):
        return 8000
    def __getitem__(self, index):
        time.sleep(0.005)
        return index

loader = autotune_loader.AutoLoader(Waiting(), batch_size=8)
for batch in loader:
    if loader.metrics()["num_workers"]:
        break
print(loader.report(), "WHOLE", loader.metrics()["num_workers"] > 0)
"""
ENABLED = """
with autotune_loader.enable("watch", output="made/loader.json"):
    read(DataLoader(Squares(), batch_size=4))
"""
READING = """
if __name__ == "__main__":
    read(DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="{}"))
"""
RESULT = """
from autotune_loader import LoaderConfig, TuningResult
result = TuningResult(best=LoaderConfig(num_workers=2), status="complete")
"""
EXTRAS = {"optuna", "pandas", "cloudpickle", "PIL", "matplotlib"}


def needed_by(name):
    """A distribution, as far as it is here, and what it needs itself."""
    try:
        asked = [Requirement(each) for each in distribution(name).requires or ()]
    except PackageNotFoundError:
        return set()
    here = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {canonicalize_name(name)}.union(*(needed_by(each.name) for each in here))


@functools.cache
def refused():
    """Modules of this environment that no light install has."""
    allowed = needed_by("autotune-loader")
    known = packages_distributions().items()
    names = {module: {canonicalize_name(each) for each in its} for module, its in known}
    found = {module for module, its in names.items() if allowed.isdisjoint(its)}
    assert found >= EXTRAS
    return found


@pytest.fixture
def bench(preloaded, tmp_path):
    bench = Bench(preloaded, tmp_path, HEAD.format(needed=EXTRAS))
    text = REFUSING.format(refused=refused(), forgotten=refused() | {"autotune_loader"})
    (tmp_path / "refusing.py").write_text(text)
    (tmp_path / "sitecustomize.py").write_text("import refusing")
    (tmp_path / "command.py").write_text(f"import refusing\n{COMMAND}")
    return bench


@pytest.mark.parametrize(
    ("typed", "body", "says"),
    [
        ("train.py", AUTO, "WHOLE True\nWHOLE True\n"),
        ("train.py", TUNED, "WHOLE True"),
        pytest.param("train.py", ENABLED, "made/loader.json.\n", marks=pytest.mark.smoke),
        ("command.py run train.py", READING.format("fork"), "autotune-loader run: 1 loader"),
    ],
)
def test_all_but_tuning_needs_no_extra(typed, body, says, bench):
    bench.write(body)
    code, output = bench.run(*typed.split())
    assert code == 0, output
    assert says in output
    assert "WHOLE True" in output
    assert "No module named" not in output


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("typed", "body", "code", "says"),
    [
        ("command.py tune train.py:Squares", "", 2, "Error: tune() needs optuna."),
        ("train.py", "autotune_loader.compare({})", 1, "Error: compare() needs cloudpickle."),
        ("train.py", "autotune_loader.TwinSampler", 1, "Error: TwinSampler needs optuna."),
        ("train.py", f"{RESULT}result.to_dataframe()", 1, "Error: to_dataframe() needs pandas."),
        ("command.py demo", "", 2, "Error: the demo needs cloudpickle."),
    ],
)
def test_what_needs_an_extra_names_it(typed, body, code, says, bench):
    bench.write(body)
    exit_code, output = bench.run(*typed.split())
    assert exit_code == code
    extra = "demo" if "demo" in typed else "tune"
    assert f"{says} Install it with: pip install 'autotune-loader[{extra}]'" in output


def test_a_file_is_shown_and_loaded(bench):
    bench.write(f"{RESULT}result.save('loader.json')\nprint(autotune_loader.load_config())")
    code, output = bench.run("train.py")
    assert code == 0, output
    code, output = bench.run("command.py", "show", "loader.json")
    assert code == 0, output
    assert "Use 2 workers" in output


def test_spawned_workers_need_no_more(bench, tmp_path):
    bench.write(READING.format("spawn"))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    typed = "command.py watch -o new/a/loader.json --json new/b/report.json train.py"
    code, output = bench.run(*typed.split(), PYTHONPATH=path)
    assert code == 0, output
    assert "WHOLE True" in output
    assert (tmp_path / "new/a/loader.json").exists()
    assert (tmp_path / "new/b/report.json").exists()
