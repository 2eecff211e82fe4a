"""How large the house is: `python -m tests.sizes` prints lines and modules of each room.

`python -m tests.sizes --tree` writes the tree of ARCHITECTURE.md anew, from the docstring of each
room's `__init__.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autotune_loader"
PAGE = ROOT / "ARCHITECTURE.md"
DOORS = ("cli", "integrations", "watch")
LAYERS = (
    (ROOT / "pyproject.toml")
    .read_text(encoding="utf-8")
    .partition("\nlayers = [")[2]
    .partition("]")[0]
)
FLOORS = [name for name in re.findall(r"\w+", LAYERS) if (PACKAGE / name).is_dir()]
"""The rooms from top to bottom, by the layers that import-linter holds."""


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name) of each `from autotune_loader.module import name`, also in functions."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ours = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("autotune_loader.")
    ]
    return {
        (str(node.module).partition(".")[2], alias.name) for node in ours for alias in node.names
    }


def named_by_doors() -> set[tuple[str, str]]:
    """What doors name of inner rooms; everybody may use the public names of the package."""
    named = set[tuple[str, str]]().union(
        *(imported(path) for door in DOORS for path in (PACKAGE / door).rglob("*.py"))
    )
    return {
        (module, name) for module, name in named if module and module.split(".")[0] not in DOORS
    }


def imports_a_module() -> float:
    """How many other modules of the package a module imports from, on average."""
    paths = list(PACKAGE.rglob("*.py"))
    return sum(len({module for module, _ in imported(path)}) for path in paths) / len(paths)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def tree() -> str:
    """Each room with the first line of its `__init__.py`'s docstring, and its rows, one a file."""
    lines = list[str]()
    for room in FLOORS:
        first, *rest = docstring(PACKAGE / room / "__init__.py").splitlines()
        rows = (f"    {line.strip()}" for line in rest if re.match(r"\s*[\w/]+\.py  ", line))
        lines += [f"{room}/  {first}", *rows]
    lines += [
        f"{name}  {docstring(PACKAGE / name).splitlines()[0]}"
        for name in ("lines.py", "version.py")
    ]
    return "\n".join(("```", *lines, "```"))


def page_with(tree: str) -> str:
    """ARCHITECTURE.md with that tree."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- tree -->\n")
    return f"{before}{begin}{tree}\n{rest[rest.index('<!-- end -->') :]}"


def main() -> None:
    if sys.argv[1:] == ["--tree"]:
        PAGE.write_text(page_with(tree()), encoding="utf-8")
        return
    print(f"{'room':14}{'lines':>7}{'modules':>9}")
    for room in sorted(
        path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    ):
        print(f"{room.name:14}{lines_of(*room.rglob('*.py')):7,}{len(list(room.rglob('*.py'))):9}")
    for folder in ("autotune_loader", "tests", "studies"):
        paths = list((ROOT / folder).rglob("*.py"))
        print(f"{folder + '/':14.14}{lines_of(*paths):7,}{len(paths):9}")
    longest = max(PACKAGE.rglob("*.py"), key=lines_of)
    print(f"the longest: {longest.relative_to(PACKAGE)}, {lines_of(longest)} lines")
    named = named_by_doors()
    modules = {module for module, _ in named}
    names = {name for _, name in named}
    print(f"doors name {len(modules)} modules and {len(names)} names")
    print(f"{imports_a_module():.2f} imports a module")


if __name__ == "__main__":
    main()
