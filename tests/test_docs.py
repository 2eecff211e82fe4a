"""Every python block of README.md and the documentation runs: a page's blocks one after the other, in one script.

A page is run in a folder of its own, with a `dataset` and a `model` at hand for pages that only show the call, and with
`tune()` held to a few short bursts. What needs several GPUs or a cluster is marked ```text or ```bash and not run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]
# Frameworks bring data, models and arguments of their own; tests/integrations and test_distributed run such code.
FRAGMENTS = {"docs/distributed.md", "docs/frameworks.md"}
QUICK = {"README.md", "docs/index.md", "docs/explanation/twin.md"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

PRELUDE = """
import functools
import torch
import autotune_loader
import autotune_loader.tuner as _tuner

_tune = _tuner.tune


@functools.wraps(_tune)
def _briefly(*arguments, **options):
    return _tune(*arguments, **{**options, "budget": 4, "max_trials": 4, "isolation": "inline", "progress": False})


_tuner.tune = autotune_loader.tune = _briefly
dataset = torch.utils.data.TensorDataset(torch.rand(256, 8), torch.randint(0, 2, (256,)))
model = torch.nn.Linear(8, 2)
"""


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line where each block begins, and its code."""
    text = page.read_text(encoding="utf-8")
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in BLOCK.finditer(text)]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with_code() -> list[object]:
    shown = [page for page in PAGES if blocks(page) and name(page) not in FRAGMENTS]
    return [pytest.param(p, id=name(p), marks=() if name(p) in QUICK else (pytest.mark.slow,)) for p in shown]


@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    code = [f"\n# {name(page)}, line {line}\n{block}" for line, block in blocks(page)]
    script = tmp_path / "page.py"
    script.write_text(PRELUDE + "".join(code), encoding="utf-8")

    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_the_code_of_a_page_is_python(page: Path) -> None:
    for line, block in blocks(page):
        compile("\n" * line + block, name(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_picture_of_a_page_is_there(page: Path) -> None:
    shown = re.findall(r"!\[[^\]]*\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))

    assert [link for link in shown if "://" not in link and not (page.parent / link).is_file()] == []


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "api" / "index.html").read_text(encoding="utf-8").count("persistent_workers") > 1
