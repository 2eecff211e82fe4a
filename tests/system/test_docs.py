"""Every python block of README.md and the documentation runs, a page in one script, and so do the notebooks.

A page has a `dataset` and a `model` at hand, and `tune()` is held to a few short bursts. What needs several GPUs or a cluster
is marked ```text or ```bash and not run.
"""

import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import autotune_loader
from autotune_loader.cli.parser import Command
from autotune_loader.report.result import TuningResult
from autotune_loader.results.record import FILE_ONLY, NOT_IN_FILE
from tests.support.bench import Bench

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages of fragments: what each block takes for granted, block by block.
TAKEN_FOR_GRANTED = {
    "docs/frameworks.md": [
        """
import lightning, transformers, accelerate
from torch.utils.data import DataLoader
from transformers import Trainer
from tests.integrations.job import Classifier, Waiting, collate as collator
from tests.integrations.lightning_parts import Module, Points
autotune_loader.tune(dataset, model, batch_size=64, output="loader.json")
pairs, dataset = dataset, Waiting(256, 0.001)
""",
        """
model, MyDataModule = Module(), lambda: Points(dataset)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
""",
        """
model = Classifier()
alone = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False, "num_train_epochs": 1}
TrainingArguments = lambda folder: transformers.TrainingArguments(folder, save_strategy="no", **alone)
""",
        """
accelerator, model, loader = accelerate.Accelerator(cpu=True), torch.nn.Linear(8, 2), DataLoader(pairs, batch_size=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    ],
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

BRIEFLY = """
import functools
import autotune_loader, autotune_loader.demo
def briefly(whole, **options):
    return functools.wraps(whole)(lambda *given, **named: whole(*given, **{**named, "progress": False, **options}))
autotune_loader.compare = briefly(autotune_loader.compare, budget=2)
autotune_loader.tune = briefly(autotune_loader.tune, budget=2)
autotune_loader.demo.job = functools.partial(autotune_loader.demo.job, latency_s=0.002)
"""
PRELUDE = f"""
import time, torch
{BRIEFLY}


class Waiting(torch.nn.Linear):  # a burst lasts as long as ever, but leaves the cores to the other tests
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


torch.nn.Linear = Waiting
dataset = torch.utils.data.TensorDataset(torch.rand(256, 8), torch.randint(0, 2, (256,)))
model = torch.nn.Linear(8, 2)
"""


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name(page)) for page in PAGES if blocks(page)]
)
def test_the_code_of_a_page_runs(page, tmp_path, request):
    found = blocks(page)
    given = TAKEN_FOR_GRANTED.get(name(page), [""] * len(found))
    code = "".join(f"{first}\n{block}\n" for first, block in zip(given, found, strict=True))
    (tmp_path / "page.py").write_text(PRELUDE + code, encoding="utf-8")
    kind = "preloaded_frameworks" if page.stem == "frameworks" else "preloaded"
    python = request.getfixturevalue(kind)
    run = python.start("page.py", folder=tmp_path, probes=True)
    assert run.wait(timeout=110) == 0, run.output


TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(torch.rand(640, 4)), batch_size=8):
        x.sum()
"""


def test_the_commands_of_the_readme_run_as_printed(preloaded, tmp_path):
    """`make demo` and `make test` are what they are said to be; what the first does runs in tests/cli."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target, does in {"demo": "autotune-loader demo", "test": "pytest"}.items():
        assert f"\nmake {target} " in text
        assert does in subprocess.check_output(["make", "-n", target], cwd=ROOT, text=True)
    bench = Bench(preloaded, tmp_path, TRAIN)
    bench.write("")
    commands = re.findall(r"`autotune-loader (\w+ (?:--[\w-]+ )?train\.py)`", text)
    assert commands == ["watch train.py", "run --allow-workers train.py", "run train.py"]
    for command in commands:
        code, _, report = bench.command(*command.split())
        assert (
            code,
            "train.py:6  TensorDataset[640], batches of 8\n  160 batches in 2 epochs" in report,
        ) == (0, True)


def test_the_documentation_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_the_reference_has_every_key_every_option_and_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text() + (ROOT / "docs" / "watch.md").read_text()
    keys = {each.name for each in fields(TuningResult)} - set(NOT_IN_FILE) | set(FILE_ONLY)
    options = {option for command in Command.all.values() for option in command.options}
    wanted = (
        keys
        | {each for each in options if each.startswith("--")} - {"--output"}
        | set(autotune_loader.__all__)
    )
    assert sorted(each for each in wanted - {"__version__"} if each not in page) == []


def test_the_contract_is_the_same_wherever_it_is_told():
    """The docstring of AutoLoader, its page, README, and the help of `run`."""
    pages = [
        page.read_text(encoding="utf-8")
        for page in (ROOT / "README.md", ROOT / "docs" / "autoloader.md")
    ]
    told = [
        re.findall(r"[\w']+", each.lower()) for each in (autotune_loader.AutoLoader.__doc__, *pages)
    ]
    told.append(re.findall(r"[\w']+", Command.all["run"].description.lower()))
    contracts = [
        re.search("it gives the samples that .* they do as there", " ".join(each)) for each in told
    ]
    assert all(contracts)
    assert len({each[0] for each in contracts}) == 1


def test_pages_are_few_and_short():
    words = [len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")]
    assert len(words) <= 13
    assert sum(words) <= 6500  # what the owner allows


@pytest.fixture(scope="module")
def build():
    pytest.importorskip("nbclient")
    return runpy.run_path(str(ROOT / "notebooks" / "build.py"))


@pytest.mark.parametrize("notebook", ["quickstart", "autoloader", "inspect_study"])
def test_a_notebook_is_what_its_script_makes_with_its_outputs_and_small(notebook, build):
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    committed = build["nbformat"].read(path, as_version=4)
    outputs = [out for cell in committed.cells for out in cell.get("outputs", [])]
    assert [cell.source for cell in committed.cells] == [
        cell.source for cell in build["make"](notebook).cells
    ]
    assert path.stat().st_size < 1_000_000
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert [out for out in outputs if out.output_type == "error"] == []


@pytest.fixture
def warm_kernel(preloaded, monkeypatch, tmp_path):
    """Jupyter's kernel, in a Python that has imported torch."""

    def launch(command, *, env, cwd, **_):
        script = tmp_path / "kernel.py"
        script.write_text("from ipykernel import kernelapp\nkernelapp.launch_new_instance()")
        run = preloaded.start(
            str(script), *command[command.index("-f") :], folder=cwd, environ=env, probes=True
        )
        run.stdin = run.stdout = run.stderr = None
        return run

    monkeypatch.setattr(
        pytest.importorskip("jupyter_client.provisioning.local_provisioner"),
        "launch_kernel",
        launch,
    )


@pytest.mark.parametrize("notebook", ["quickstart", "inspect_study"])
@pytest.mark.usefixtures("warm_kernel")
@pytest.mark.filterwarnings("ignore")  # of the kernel's client: sockets, event loops
def test_a_notebook_runs(notebook, tmp_path, build):
    made = build["make"](notebook)
    made.cells.insert(0, build["CODE"](BRIEFLY))
    build["run"](made, tmp_path, timeout_s=100)
    assert (tmp_path / "loader.json").exists()
