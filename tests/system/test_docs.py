"""README, documentation and notebooks: their code runs, and names what there is.

A page is one script, with a `dataset` and a `model` at hand; `tune()` has a few short bursts. What
needs several GPUs or a cluster is marked ```text or ```bash and not run.
"""

import ast
import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import autotune_loader
from autotune_loader import AutoLoader, Comparison, LoaderConfig, TuningResult, tune
from autotune_loader.cli.app import make_parser
from autotune_loader.results.result import NOT_IN_FILE
from tests.support.bench import Bench

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = ["quickstart", "autoloader", "inspect_study"]
RETURNS = {"tune": TuningResult, "compare": Comparison, "load_config": LoaderConfig}
BRIEFLY = """
import functools
import autotune_loader, autotune_loader.demo
def briefly(whole, **options):
    options["progress"] = False
    return functools.wraps(whole)(lambda *given, **named: whole(*given, **{**named, **options}))
autotune_loader.compare = briefly(autotune_loader.compare, budget=2)
autotune_loader.tune = briefly(autotune_loader.tune, budget=2)
autotune_loader.demo.job = functools.partial(autotune_loader.demo.job, latency_s=0.002)
"""
PRELUDE = f"""
import time, torch
{BRIEFLY}

class Waiting(torch.nn.Linear):  # a burst lasts as long as ever, but leaves the cores to others
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

torch.nn.Linear = Waiting
dataset = torch.utils.data.TensorDataset(torch.rand(256, 8), torch.randint(0, 2, (256,)))
model = torch.nn.Linear(8, 2)
"""
# Of a page of fragments: what each block takes for granted, block by block.
FRAGMENTS = """
import lightning, transformers, accelerate
from torch.utils.data import DataLoader
from transformers import Trainer
from tests.integrations.job import Classifier, Waiting, collate as collator
from tests.integrations.lightning_parts import QUIET, Module, Points
autotune_loader.tune(dataset, model, batch_size=64, output="loader.json")
pairs, dataset = dataset, Waiting(256, 0.001)
# BLOCK
model, MyDataModule = Module(), lambda: Points(dataset)
trainer = lightning.Trainer(max_epochs=1, logger=False, **QUIET)
# BLOCK
model = Classifier()
alone = dict(use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", num_train_epochs=1)
TrainingArguments = lambda folder: transformers.TrainingArguments(
    folder, remove_unused_columns=False, **alone
)
# BLOCK
accelerator, model = accelerate.Accelerator(cpu=True), torch.nn.Linear(8, 2)
loader, optimizer = DataLoader(pairs, 16), torch.optim.SGD(model.parameters(), lr=0.1)
"""


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


WITH_CODE = [page for page in PAGES if blocks(page)]


def cells(notebook):
    notebook = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text("utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def code_of(place):
    """The code of a page or a notebook, as far as it is Python's."""
    if isinstance(place, Path):
        return "".join(blocks(place))
    lines = "\n".join("".join(cell["source"]) for cell in cells(place))
    return re.sub(r"^%.*$", "", lines, flags=re.MULTILINE)


class OurNames(ast.NodeVisitor):
    """Follows what names hold, as far as it is ours; a class stands for its instances, too.

    Raises:
        AttributeError: there is no such name.
        TypeError: nobody takes such an argument.
    """

    def __init__(self):
        self.holds, self.calls = {}, 0

    def visit_Import(self, node):
        ours = [each.name for each in node.names if each.name == "autotune_loader"]
        self.holds |= dict.fromkeys(ours, autotune_loader)

    def visit_ImportFrom(self, node):
        if node.module.partition(".")[0] == "autotune_loader":
            for each in node.names:
                if each.name == "demo":
                    importlib.import_module("autotune_loader.demo")
                self.holds[each.name] = getattr(importlib.import_module(node.module), each.name)

    def visit_Assign(self, node):
        self.visit(node.value)
        for each in node.targets:
            names = getattr(each, "elts", [each])
            held = self.value(node.value) if names == [each] else None
            self.holds |= {one.id: held for one in names if isinstance(one, ast.Name)}

    def visit_Call(self, node):
        self.value(node)
        self.generic_visit(node)

    def visit_Attribute(self, node):
        self.value(node)
        self.generic_visit(node)

    def value(self, node):
        if isinstance(node, ast.Name):
            return self.holds.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self.value(node.value)) is not None:
            kinds = getattr(owner, "__mro__", ())
            if any(node.attr in inspect.get_annotations(each) for each in kinds):
                return None
            found = getattr(owner, node.attr)
            return found if callable(found) else None
        if isinstance(node, ast.Call) and (called := self.value(node.func)) is not None:
            self.calls += 1
            takes = inspect.signature(called).parameters
            if any(each.kind is each.VAR_KEYWORD for each in takes.values()):  # handed on
                takes = {*takes, *inspect.signature(tune).parameters}
            for each in node.keywords:
                if each.arg not in {None, *takes}:
                    raise TypeError(f"{called.__qualname__}({each.arg}=) in line {node.lineno}")
            return called if inspect.isclass(called) else RETURNS.get(called.__name__)
        return None


@pytest.mark.parametrize("place", [*WITH_CODE, *NOTEBOOKS], ids=lambda place: Path(place).name)
def test_a_pages_code_names_what_there_is(place):
    names = OurNames()
    names.visit(ast.parse(code_of(place)))
    assert names.calls


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("from autotune_loader import tuned", AttributeError),
        ("from autotune_loader import tune\nresult = tune(x)\nresult.fastest", AttributeError),
        ("from autotune_loader import tune\ntune(x).report(colour=1)", TypeError),
        ("import autotune_loader\nautotune_loader.AutoLoader(x, batches=1)", TypeError),
    ],
)
def test_a_name_that_is_not_there_is_found(code, error):
    with pytest.raises(error):
        OurNames().visit(ast.parse(code))


@pytest.mark.system
@pytest.mark.timeout(300)  # the page of frameworks imports them for its bursts, too
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, preloaded):
    found = blocks(page)
    given = FRAGMENTS.split("# BLOCK") if page.stem == "frameworks" else [""] * len(found)
    code = "".join(f"{first}\n{block}\n" for first, block in zip(given, found, strict=True))
    preloaded.ran(PRELUDE + code, folder=tmp_path, probes=True, timeout=280)


TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(torch.rand(640, 4)), batch_size=8):
        x.sum()
"""


@pytest.mark.system
def test_the_commands_of_the_readme_run_as_printed(preloaded, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    bench = Bench(preloaded, tmp_path, TRAIN)
    bench.write("")
    commands = re.findall(r"\bautotune-loader (\w+ (?:--[\w-]+ )?train\.py)", text)
    assert commands == ["watch train.py", "run --allow-workers train.py"]
    for command in commands:
        code, _, report = bench.command(*command.split())
        assert code == 0, report
        assert "train.py:6  TensorDataset[640], batches of 8\n" in report
        assert "\n  160 batches in 2 epochs" in report


@pytest.mark.process
def test_the_readmes_targets_do_as_told():
    """What the first one does runs in tests/cli."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target, does in {"demo": "autotune-loader demo", "test": "pytest"}.items():
        assert f"\nmake {target} " in text
        assert does in subprocess.check_output(["make", "-n", target], cwd=ROOT, text=True)


@pytest.mark.system
@pytest.mark.smoke
def test_the_documentation_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    done = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reference_has_every_key_and_option():
    """A row of its tables names each."""
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    first = re.findall(r"^\| (`.*?) \|", page.partition("## loader.json")[2], re.MULTILINE)
    keys = {each.name for each in fields(TuningResult)} - set(NOT_IN_FILE)
    keys |= {"schema_version", "created_by", "dataloader_kwargs", "extras"}
    assert keys == set(re.findall(r"`(\w+)`", " ".join(first)))
    page += (ROOT / "docs" / "watch.md").read_text("utf-8")
    rows = re.findall(r"^\|.*", page, re.MULTILINE)
    told = set(re.findall(r"`([\w-]+)", " ".join(rows)))
    options = {option for command in make_parser()[1].values() for option in command.options}
    long = {each for each in options if each.startswith("--")}
    assert long - told == {"--help", "--output"}  # told of as -o


def test_the_contract_is_told_alike_everywhere():
    """The docstring of AutoLoader, its page, README, and the help of `run`."""
    pages = [ROOT / "README.md", ROOT / "docs" / "autoloader.md"]
    texts = [AutoLoader.__doc__, make_parser()[1]["run"].description]
    texts += [page.read_text(encoding="utf-8") for page in pages]
    told = [" ".join(re.findall(r"[\w']+", each.lower())) for each in texts]
    contracts = [re.findall("it gives the samples that .* they do as there", each) for each in told]
    assert contracts[0]
    assert contracts == [contracts[0]] * 4


def test_pages_are_few_and_short():
    words = [len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")]
    assert len(words) <= 13
    assert sum(words) <= 6500  # what the owner allows


@pytest.fixture(scope="module")
def build():
    pytest.importorskip("nbclient")
    return runpy.run_path(str(ROOT / "notebooks" / "build.py"))


@pytest.mark.system
@pytest.mark.smoke
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_what_its_script_makes(notebook, build):
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    made = build["make"](notebook).cells
    assert ["".join(cell["source"]) for cell in cells(notebook)] == [
        cell.source for cell in made if cell.cell_type == "code"
    ]
    assert path.stat().st_size < 1_000_000
    outputs = [out for cell in cells(notebook) for out in cell["outputs"]]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert [out for out in outputs if out["output_type"] == "error"] == []


@pytest.fixture
def warm_kernel(preloaded, monkeypatch, tmp_path):
    """Jupyter's kernel, in a Python that has imported torch."""

    def launch(command, *, env, cwd, **_):
        script = tmp_path / "kernel.py"
        script.write_text("from ipykernel import kernelapp\nkernelapp.launch_new_instance()")
        given = command[command.index("-f") :]
        run = preloaded.start(str(script), *given, folder=cwd, environ=env, probes=True)
        run.stdin = run.stdout = run.stderr = None
        return run

    provisioner = pytest.importorskip("jupyter_client.provisioning.local_provisioner")
    monkeypatch.setattr(provisioner, "launch_kernel", launch)


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("notebook", NOTEBOOKS)
@pytest.mark.usefixtures("warm_kernel")
@pytest.mark.filterwarnings("ignore")  # of the kernel's client: sockets, event loops
def test_a_notebook_runs(notebook, tmp_path, build):
    made = build["make"](notebook)
    for cell in made.cells:
        cell.source = cell.source.replace("for epoch in range(8)", "for epoch in range(3)")
    made.cells.insert(0, build["CODE"](BRIEFLY))
    build["run"](made, tmp_path, timeout_s=200)
    assert (tmp_path / "loader.json").exists()
