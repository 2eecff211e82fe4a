"""How the package is built, in figures, from its source alone: `python -m studies.house [--check]`.

Nothing is imported, and no path is known beforehand: whatever lies below the package's folder is counted where it lies.
`--check` fails on import cycles between files, on functions with too many parameters and on classes with too many methods.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "autotune_loader"
MOST_PARAMETERS, MOST_METHODS, MOST_LINES = 8, 20, 60
# A record that draws itself: the import in a method of the first is allowed, to anything within the second.
LAZY_FACADES = (("results.views", "report"),)
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Within the package, such as "twin.model"; a folder's `__init__` bears the folder's name, the package's own none."""
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def folder(self) -> str:
        """The top-level folder, or "." for files of the package's root."""
        parts = self.name.split(".")
        return parts[0] if len(parts) > 1 or (self.name and self.path.name == "__init__.py") else "."


def defined(node: ast.AST, within: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every function and class with its name in the file, such as "Class.method"."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, Function | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
            yield name, child
        yield from defined(child, name)


def modules_of(package: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def imports_of(module: Module, package: str, names: set[str]) -> set[str]:
    """The package's modules that this one imports, at its top or in functions, but for type checking."""
    found: set[str] = set()
    pending: list[ast.AST] = [module.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {_within(alias.name, package) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _within(node.module or "", package) if not node.level else _above(node, module)
            deeper = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            found |= {each if each in names else base for each in deeper}
    facades = [target for source, target in LAZY_FACADES if module.name == source]
    allowed = {name for name in found for target in facades if f"{name}.".startswith(f"{target}.")}
    return (found & names) - {module.name} - allowed


def _within(name: str, package: str) -> str:
    """An absolute name as `Module.name` has it; what is not the package's keeps a colon, so that it is no module's name."""
    return "" if name == package else name.removeprefix(package + ".") if name.startswith(package + ".") else ":" + name


def _above(node: ast.ImportFrom, module: Module) -> str:
    """What a relative import takes its names from."""
    parts = [part for part in module.name.split(".") if part]
    up = node.level - (module.path.name == "__init__.py")
    return ".".join([*parts[: len(parts) - up], node.module or ""]).strip(".")


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reached = {name: set(direct) for name, direct in graph.items()}
    for between in graph:
        for far in reached.values():
            far |= reached[between] if between in far else set()
    groups = {frozenset(other for other in far if name in reached[other]) for name, far in reached.items()}
    return sorted(sorted(group) for group in groups if group)


def parameters(function: Function) -> list[str]:
    """All but `self` and `cls`."""
    named = [each.arg for each in ast.iter_child_nodes(function.args) if isinstance(each, ast.arg)]
    return named[1:] if named[:1] in (["self"], ["cls"]) else named


def may_have_many(module: Module, name: str, function: Function, exported: set[str]) -> bool:
    """Whether the signature is the user's: exported names, integrations, click commands, what mirrors DataLoader."""
    is_command = any(re.search(r"click\.|\.command", ast.unparse(each)) for each in function.decorator_list)
    mirrors_loader = name.endswith(".__init__") and {"dataset", "batch_size"} <= set(parameters(function))
    return name.split(".")[0] in exported or module.folder == "integrations" or is_command or mirrors_loader


def exported_by(package: Module) -> set[str]:
    """The names in the package's `__all__`."""
    for node in package.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node).split("=")[0] and node.value:
            return {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return set()


def constants(module: Module) -> list[tuple[str, bool]]:
    """Constants at the module's top level, and whether a comment or docstring says why; a sentence speaks for itself."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    found = []
    for node, after in pairwise([*module.tree.body, None]):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        lines = {node.lineno - 1, node.lineno, node.end_lineno}
        is_told = has_docstring or bool(lines & commented) or _is_sentence(node)
        found += [(name, is_told) for name in names if CONSTANT.fullmatch(name)]
    return found


def _is_sentence(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and " " in value.value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.house", description=__doc__)
    parser.add_argument("--package", type=Path, default=PACKAGE, help="folder of the package")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the package breaks a rule")
    chosen = parser.parse_args(arguments)
    modules = modules_of(chosen.package)
    lines_of = {name: len(each.text.splitlines()) for name, each in modules.items()}
    print(f"{sum(lines_of.values())} lines in {len(modules)} files")
    for folder in sorted({each.folder for each in modules.values()}):
        mine = [lines_of[each.name] for each in modules.values() if each.folder == folder]
        print(f"  {folder:14} {sum(mine):6} lines {len(mine):4} files")
    broken = cycles({name: imports_of(each, chosen.package.name, set(modules)) for name, each in modules.items()})
    _print(
        "groups of files that import each other", [", ".join(name or "__init__" for name in each) for each in broken]
    )
    exported = exported_by(modules[""]) if "" in modules else set()
    wide, users, large, long, calls = list[str](), list[str](), list[str](), list[str](), list[str]()
    for module in modules.values():
        for name, node in defined(module.tree):
            where = f"{module.name}: {name}"
            if isinstance(node, ast.ClassDef):
                count = len({each.name for each in node.body if isinstance(each, Function)})
                large += [f"{where}, {count}"] * (count > MOST_METHODS)
                continue
            count, lines = len(parameters(node)), (node.end_lineno or node.lineno) - node.lineno + 1
            into = users if may_have_many(module, name, node, exported) else wide
            into += [f"{where}, {count}"] * (count > MOST_PARAMETERS)
            long += [f"{where}, {lines}"] * (lines > MOST_LINES)
        called = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
        loaders = [node for node in called if ast.unparse(node.func).split(".")[-1] in ("DataLoader", "loader_class")]
        calls += [f"{module.name}: line {node.lineno}" for node in loaders]
    _print(f"functions with more than {MOST_PARAMETERS} parameters", wide)
    _print("more that users call, which may", users)
    _print(f"classes with more than {MOST_METHODS} methods", large)
    _print(f"functions longer than {MOST_LINES} lines", long)
    known = [constant for each in modules.values() for constant in constants(each)]
    print(f"{len(known)} constants, {sum(not told for _, told in known)} of them without a word on why")
    _print("places that call DataLoader(...), of which there shall be one", calls)
    return int(chosen.check and bool(broken or wide or large))


def _print(what: str, found: list[str]) -> None:
    print(f"{len(found)} {what}" + "".join(f"\n  {each}" for each in found))


if __name__ == "__main__":
    sys.exit(main())
