"""What the layers of import-linter do not say: doors, names, what is run, what an import costs."""

import ast
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
from collections import Counter

import pytest

import autotune_loader
from tests.sizes import FLOORS, PACKAGE, PAGE, ROOT, named_by_doors, page_with, tree

MOST_MODULES, MOST_NAMES = 12, 25
# Where bytes become objects: all of them come from our own processes, through memory, a file
# without a name or a folder that nobody else may enter.
UNPICKLING = {
    "watch/others.py": {"loads"},
    "bursts/packing.py": {"loads"},
    "bursts/settings.py": {"loads"},
    "pipeline/by_value.py": {"loads"},
    "autoloader/channel.py": {"loads"},  # between the loop and its workers
    "autoloader/segments.py": {"loads"},
    "machine/nursery.py": {"loads"},
    "machine/clones.py": {"loads"},
    "machine/parcel.py": {"Unpickler", "loads"},
    "watch/launch.py": {"compile", "exec"},  # the script that the user asked to be run
}
# What costs start-up time: all that the package and its extras depend on.
HEAVY = {
    *("torch", "numpy", "psutil", "pynvml", "optuna", "pandas", "cloudpickle", "PIL", "matplotlib"),
}
NEVER = {"eval", "exec", "compile", "__import__"}
LOADING = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "yaml", "torch"}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_doors_name_few_modules_and_few_names():
    named = named_by_doors()
    assert len({module for module, _ in named}) <= MOST_MODULES, sorted(named)
    assert len({name for _, name in named}) <= MOST_NAMES, sorted(named)


def test_a_files_or_classs_name_stands_once():
    paths = list(PACKAGE.rglob("*.py"))
    trees = [parsed(path) for path in paths]
    classes = [each.name for tree in trees for each in ast.walk(tree) if type(each) is ast.ClassDef]
    files = [path.name for path in paths if not path.name.startswith("__")]
    assert [name for name, count in Counter(files + classes).items() if count > 1] == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_exist(page):
    text = (PACKAGE.parent / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", text))
    assert len(named) > 5
    roots = (PACKAGE, PACKAGE.parent)
    assert [each for each in named if not any((root / each).exists() for root in roots)] == []


def test_the_architectures_tree_has_each_file():
    assert PAGE.read_text(encoding="utf-8") == page_with(tree()), (
        "run: python -m tests.sizes --tree"
    )
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(FLOORS)
    paths = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    files = [path.relative_to(PACKAGE).as_posix().split("/", 1)[-1] for path in paths]
    assert sorted(re.findall(r"^ *([\w/]+\.py)  ", tree(), flags=re.MULTILINE)) == sorted(files)


def test_private_names_of_torch_are_listed():
    """Attributes of its iterator that the subclass uses are in tests/autoloader/test_torchs.py."""
    table = PAGE.read_text(encoding="utf-8").partition("## Torch's private names")[2]
    table = table.partition("## Python's private names")[0]
    rows = dict(re.findall(r"^\| `(\S+)` \|(.*)$", table, flags=re.MULTILINE))
    missing, own = set[str](), re.compile(r"from torch[\w.]*( import _|\._)|torch[\w.]*\._(?!_)")
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(parsed(path)):
            text = ast.unparse(node) if isinstance(node, ast.ImportFrom | ast.Attribute) else ""
            is_told = text and text.split(".")[-1].split()[-1] in rows.get(where, "")
            if own.match(text) and where != "autoloader/torchs.py" and not is_told:
                missing.add(f"{where}: {text}")
    assert missing == set()


def test_private_names_of_python_are_listed():
    table = PAGE.read_text(encoding="utf-8").partition("## Python's private names")[2]
    rows = dict(re.findall(r"^\| `(\S+)` \|(.*)$", table, flags=re.MULTILINE))
    names = re.compile(r"\b(_resource_tracker|_sentinel|child_w|_run_module_as_main|_signal)\b")
    for path in PACKAGE.rglob("*.py"):
        used = {*names.findall(path.read_text(encoding="utf-8"))}
        assert used <= {*names.findall(rows.get(path.relative_to(PACKAGE).as_posix(), ""))}


def test_public_names_are_those_of_the_reference():
    """`__all__`, the reference, `dir()` and what type checkers see are one."""
    public = set(autotune_loader.__all__) - {"__version__"}
    reference = (PACKAGE.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: autotune_loader\.(\w+)$", reference, re.MULTILINE)) == sorted(
        public
    )
    seen = parsed(PACKAGE / "__init__.py")
    (typed,) = (node for node in seen.body if isinstance(node, ast.If))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} == public
    assert {*dir(autotune_loader)} == {*public, "__version__"}
    assert [name for name in public if getattr(autotune_loader, name).__name__ != name] == []
    assert autotune_loader.__version__ == importlib.metadata.version("autotune-loader")


def test_nothing_from_disk_is_unpickled_or_run():
    """Files are data, never code."""
    found = dict[str, set[str]]()
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(parsed(path))
        for call in [node.func for node in nodes if isinstance(node, ast.Call)]:
            name = getattr(call, "id", None) or getattr(call, "attr", "")
            module = getattr(getattr(call, "value", None), "id", "")
            is_loaded = module in LOADING and name in {"load", "loads", "open", "Unpickler"}
            if is_loaded or (isinstance(call, ast.Name) and name in NEVER):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
    assert found == UNPICKLING


@pytest.mark.process
def test_package_and_help_import_nothing_heavy():
    script = "import json, sys; from autotune_loader.cli import main; main(['--help'])"
    script += "; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert HEAVY.isdisjoint(json.loads(done.stdout.splitlines()[-1]))


NEWER = """
import importlib, pathlib, sys, typing
from torch.utils.data import DataLoader

for name in [name for name in sys.modules if name.partition(".")[0] == "autotune_loader"]:
    del sys.modules[name]
DataLoader.__parameters__ += (typing.TypeVar("Collated"),)  # as it is after pytorch#179707
try:
    DataLoader[int]
except TypeError:
    print("NEWER")
for path in map(pathlib.Path, sys.argv[1:]):
    importlib.import_module(".".join(path.with_suffix("").parts))
from autotune_loader import AutoLoader
print(AutoLoader.__parameters__, [*AutoLoader(range(4), batch_size=2, num_workers=0)])
"""


@pytest.mark.process
def test_two_type_parameters_of_dataloader_break_no_import(preloaded, tmp_path):
    paths = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("[!_]*.py")]
    modules = [str(path) for path in paths if path.name != "sitecustomize.py"]
    output = preloaded.ran(NEWER, *modules, folder=tmp_path)
    assert output == "NEWER\n(+T_co,) [tensor([0, 1]), tensor([2, 3])]\n"


def test_a_tests_name_has_at_most_eight_words():
    paths = (ROOT / "tests").rglob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    names = re.findall(r"^def test_(\w+)", text, re.MULTILINE)
    assert [name for name in names if name.count("_") >= 8] == []
