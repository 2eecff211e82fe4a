from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "__init__.py": """
        __all__ = ["tune"]
        from package.values.config import Config
        def tune(a, b, c, d, e, f, g, h, i): ...
    """,
    "values/__init__.py": "",
    "values/config.py": """
        # Why it is four.
        WORKERS = 4
        PREFETCH = 2  # why it is two
        SECONDS = 1.5
        \"\"\"Why it is 1.5.\"\"\"
        UNTOLD = 7
        SENTENCE = "it tells what it is for"
        class Config: ...
    """,
    "results/__init__.py": "",
    "results/views.py": """
        def report(self):
            from package.report import page
            return page
    """,
    "report/__init__.py": "",
    "report/page.py": """
        from typing import TYPE_CHECKING
        from package.results.views import report
        if TYPE_CHECKING:
            from package.twin.model import Model
    """,
    "twin/__init__.py": "",
    "twin/model.py": """
        import report
        from torch.utils.data import DataLoader
        from package.report.page import report
        class Model:
            def fit(self, a, b, c, d, e, f, g, h): ...
        loader = DataLoader([])
    """,
}


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("studies.house")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        write(tmp_path / "package" / name, text)
    return tmp_path / "package"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).strip() + "\n")


def test_a_sound_package_passes_and_its_figures_are_told(
    house: ModuleType, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a package whose only circles are a lazy facade and an import for type checking
    # WHEN it is checked
    code = house.main(["--package", str(package), "--check"])
    # THEN it passes, and the wide function is the user's
    told = capsys.readouterr().out
    assert code == 0, told
    assert "0 groups of files that import each other" in told
    assert "0 functions with more than 8 parameters\n1 more that users call, which may\n  : tune, 9\n" in told
    assert "5 constants, 1 of them without a word on why" in told
    assert "1 places that call DataLoader(...), of which there shall be one\n  twin.model: line 6\n" in told
    assert "values 9 lines 2 files" in " ".join(told.split())


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "values/config.py",
            "def late():\n    from ..twin.model import Model",
            "1 groups of files that import each other\n  twin.model, values.config",
        ),
        ("twin/fit.py", "def fit(a, b, c, d, e, f, g, *, h, **i): ...", "twin.fit: fit, 9"),
        (
            "twin/fit.py",
            "class Fit:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21)),
            "1 classes with more than 20 methods\n  twin.fit: Fit, 21",
        ),
        ("integrations/trainer.py", "def train(a, b, c, d, e, f, g, *, h, **i): ...", None),
        ("cli/run.py", "@click.command()\ndef run(a, b, c, d, e, f, g, h, i): ...", None),
    ],
)
def test_the_check_fails_where_a_rule_is_broken(
    house: ModuleType,
    package: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    complaint: str | None,
) -> None:
    # GIVEN the same package with one more fault; the package's own file imports twin, too
    write(package / name, text)
    with (package / "__init__.py").open("a") as file:
        file.write("\nfrom package.twin import model\n")
    with (package / "twin/model.py").open("a") as file:
        file.write("\nfrom package.values import config\n")
    # WHEN it is looked at THEN only the check fails, and says where; what users call may be wide
    arguments = ["--package", str(package)]
    assert house.main(arguments) == 0
    assert house.main([*arguments, "--check"]) == int(complaint is not None)
    assert (complaint or "") in capsys.readouterr().out


def test_no_two_files_of_the_studies_import_each_other(house: ModuleType) -> None:
    assert house.main(["--package", str(ROOT / "studies"), "--check"]) == 0
