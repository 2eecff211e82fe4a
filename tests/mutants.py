"""Do a room's unit tests notice when one of its lines is wrong? `python -m tests.mutants ROOM`

    tests/ROOM ──► coverage: which unit test runs which line of the room
    these lines ──► all changes of them ──► 40 by seed ──► each in a fork ──► noticed | survives

A change is one of: a comparison, a number by one, `+` and `-`, `and` and `or`, a condition, a
statement that is dropped, a value that is returned. In a fork the changed module takes the place of
the one on disk, and those tests that run the line run until one fails. A change that no test can
notice, as nothing observable differs, stands in `equivalent_mutants.txt` and is not drawn.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autotune_loader"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
A_ROOM = 40
DEADLINE_S = 300.0  # a change by which the tests never end is noticed
PLAIN = ("-m", "unit", "-q", "-p", "no:cacheprovider", "-p", "no:rerunfailures")

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One change of a module: the place of a node in `ast.walk`, and what stands there instead."""

    path: Path
    line: int
    place: int
    before: str
    after: ast.AST
    function: str

    def __str__(self) -> str:
        return self.key.replace(" ", f":{self.line} ", 1)

    @property
    def key(self) -> str:
        """The same text in `equivalent_mutants.txt`, where lines may have moved."""
        where = f"{self.path.relative_to(PACKAGE)} {self.function}"
        return f"{where}: {self.before} -> {ast.unparse(self.after)}"

    def module(self) -> ast.Module:
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        node = list(ast.walk(tree))[self.place]
        return ast.fix_missing_locations(Put(node, ast.copy_location(self.after, node)).visit(tree))


class Put(ast.NodeTransformer):
    def __init__(self, node: ast.AST, other: ast.AST) -> None:
        self.node, self.other = node, other

    def visit(self, node: ast.AST) -> Any:
        return self.other if node is self.node else self.generic_visit(node)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    if isinstance(node, ast.Compare):
        for number, op in enumerate(node.ops):
            if type(op) in SWAPPED:
                other = copy.deepcopy(node)
                other.ops[number] = SWAPPED[type(op)]()  # type: ignore[call-overload]
                yield other
    elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPPED:
        other = copy.deepcopy(node)
        other.op = SWAPPED[type(node.op)]()  # type: ignore[assignment]
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + step) for step in (-1, 1))
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Return) and node.value is not None:
        is_bool = isinstance(node.value, (ast.Compare, ast.BoolOp)) or (
            isinstance(node.value, ast.UnaryOp) and isinstance(node.value.op, ast.Not)
        )
        values = (True, False) if is_bool else (None,)
        yield from (ast.Return(ast.Constant(value)) for value in values)
    is_prose = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    sets_a_part = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    if sets_a_part or (isinstance(node, DROPPED) and not is_prose):
        yield ast.Pass()


def mutants(path: Path, lines: set[int]) -> Iterator[Mutant]:
    """All changes in these lines of a module that change what is computed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    places = {node: place for place, node in enumerate(ast.walk(tree))}
    skipped = set[ast.AST]()
    functions = dict[ast.AST, str]()
    for node in places:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.update(dict.fromkeys(ast.walk(node), node.name))
        for name in ("annotation", "returns"):
            if isinstance(part := getattr(node, name, None), ast.AST):
                skipped.update(ast.walk(part))
    for node, place in places.items():
        if node in skipped or getattr(node, "lineno", None) not in lines or node not in functions:
            continue
        before = ast.unparse(node)
        for after in changes(node):
            if before != ast.unparse(after):
                yield Mutant(path, node.lineno, place, before, after, functions[node])  # type: ignore[attr-defined]


def tests_by_line(room: str) -> dict[Path, dict[int, frozenset[str]]]:
    """For each line of a room its unit tests that run it; SystemExit where one of these fails."""
    folder = ROOT / "tests" / room
    if not folder.is_dir():
        return {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        data = Path(name) / "coverage"
        command = [sys.executable, "-m", "pytest", folder, *PLAIN, "-n", "2"]
        command += [f"--cov={PACKAGE / room}", "--cov-context=test", "--cov-report="]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(data)}, capture_output=True
        )
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            return {}
        if done.returncode:
            raise SystemExit(f"{done.stdout.decode()}\nthe tests fail without a change")
        read = coverage.CoverageData(str(data))
        read.read()
        return {
            Path(path): {
                line: frozenset(context.rpartition("|")[0] for context in contexts if context)
                for line, contexts in read.contexts_by_lineno(path).items()
            }
            for path in read.measured_files()
        }


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module as it is changed."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        parts = mutant.path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts).removesuffix(".__init__")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        found = importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)
        if found and self.mutant.path.name == "__init__.py":
            found.submodule_search_locations = [str(self.mutant.path.parent)]
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self.mutant.module(), str(self.mutant.path), "exec"), vars(module))


class Only:
    """Of the tests that are collected, those that run the line."""

    def __init__(self, tests: frozenset[str]) -> None:
        self.tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.tests]


def run(mutant: Mutant, tests: frozenset[str]) -> None:
    """In a fork: exits with 0 where the tests pass in spite of the change."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(ROOT)
    sys.meta_path.insert(0, Changed(mutant))
    files = sorted({test.partition("::")[0] for test in tests})
    os._exit(int(pytest.main([*PLAIN, "-x", "-n0", *files], plugins=[Only(tests)])))


def survives(mutant: Mutant, tests: frozenset[str]) -> bool:
    process = multiprocessing.get_context("fork").Process(target=run, args=(mutant, tests))
    process.start()
    process.join(DEADLINE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def unchanged(mutant: Mutant) -> Mutant:
    """The module as it is, put in its place in the same way."""
    node = list(ast.walk(ast.parse(mutant.path.read_text(encoding="utf-8"))))[mutant.place]
    return replace(mutant, after=node)


def rooms() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "rooms", nargs="*", metavar="ROOM", help=f"one of {', '.join(rooms())}; default: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="which changes are drawn (default: 0)")
    parser.add_argument(
        "--count", type=int, default=A_ROOM, help=f"changes a room (default: {A_ROOM})"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once (default: 2)")
    options = parser.parse_args(argv)
    if unknown := set(options.rooms) - set(rooms()):
        parser.error(f"ROOM is {unknown.pop()!r}; it is one of {', '.join(rooms())}")
    importlib.import_module("torch._dynamo")  # once, for all forks
    # As in conftest.py, but forks remove nothing.
    with tempfile.TemporaryDirectory(prefix="tests-") as tempfile.tempdir:
        os.environ["TMPDIR"] = str(tempfile.tempdir)
        draw(options)


def draw(options: argparse.Namespace) -> None:
    equivalent = {line.partition("  # ")[0] for line in EQUIVALENT.read_text().splitlines()}
    print(f"{'room':14}{'lines run':>10}{'changes':>9}{'drawn':>7}{'survive':>9}", flush=True)
    for room in options.rooms or rooms():
        covered = tests_by_line(room)
        lines = {path: {line for line, tests in covered[path].items() if tests} for path in covered}
        found = [each for path in sorted(lines) for each in mutants(path, lines[path])]
        found = [each for each in found if each.key not in equivalent]
        random.Random(f"{options.seed} {room}").shuffle(found)
        drawn = found[: options.count]
        tests = [covered[each.path][each.line] for each in drawn]
        if drawn and not survives(unchanged(drawn[0]), tests[0]):
            raise SystemExit(f"{room}: tests fail without a change, as they run alone")
        with ThreadPoolExecutor(options.jobs) as pool:
            lived = list(pool.map(survives, drawn, tests))
        share = f"{sum(lived) / len(drawn):.0%}" if drawn else "-"
        count = sum(map(len, lines.values()))
        print(f"{room:14}{count:10,}{len(found):9,}{len(drawn):7}{share:>9}", flush=True)
        for mutant in sorted(itertools.compress(drawn, lived), key=str):
            print(f"    {mutant}", flush=True)


if __name__ == "__main__":
    main()
