"""The notebooks: committed with outputs, no larger than a code host shows, made by `notebooks/build.py`, and they run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

pytestmark = pytest.mark.system

FOLDER = Path(__file__).parents[2] / "notebooks"
BUILD = runpy.run_path(str(FOLDER / "build.py"))
BRIEFLY = """
import functools
import autotune_loader
briefly = lambda whole, budget: functools.wraps(whole)(lambda *a, **o: whole(*a, **{**o, "budget": budget}))
autotune_loader.tune, autotune_loader.compare = briefly(autotune_loader.tune, 5), briefly(autotune_loader.compare, 2)
"""


@pytest.mark.parametrize("name", ["quickstart", "autoloader", "inspect_study"])
def test_a_notebook_is_what_its_script_makes_with_its_outputs_and_small(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    committed = nbformat.read(path, as_version=4)
    outputs = [out for cell in committed.cells for out in cell.get("outputs", [])]

    assert [cell.source for cell in committed.cells] == [cell.source for cell in BUILD["make"](name).cells]
    assert path.stat().st_size < 1_000_000
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert [out for out in outputs if out.output_type == "error"] == []


@pytest.mark.parametrize("name", ["quickstart", "inspect_study"])
@pytest.mark.filterwarnings("ignore")  # of the kernel's client: sockets, event loops
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    notebook = BUILD["make"](name)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BRIEFLY))

    BUILD["run"](notebook, tmp_path, timeout_s=100)

    assert (tmp_path / "loader.json").exists()
