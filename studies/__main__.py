"""`python -m studies` lists the studies with their questions; `python -m studies NAME --help` has the options of one.

--only takes words, by commas: rows, jobs or groups with one of them. --quick is the same in small.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from studies.study import machine, print_table

HERE = Path(__file__).parent


def questions() -> dict[str, str]:
    """The first line of each study's docstring, by its name; nothing is imported for it."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            target.id
            for each in tree.body
            if isinstance(each, ast.Assign)
            for target in ast.walk(each.targets[0])
            if isinstance(target, ast.Name)
        }
        if "BAR" in names:
            name = ".".join(path.relative_to(HERE).with_suffix("").parts)
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def options_of(study: Any, arguments: list[str]) -> dict[str, Any]:
    """What is given for the arguments of `rows()`: their defaults say of what kind they are."""
    form = argparse.RawDescriptionHelpFormatter
    name = study.__name__.removeprefix("studies.")
    parser = argparse.ArgumentParser(f"python -m studies {name}", description=study.__doc__, formatter_class=form)
    for each, parameter in inspect.signature(study.rows).parameters.items():
        flag, default = f"--{each.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default: {default!r}")
    return vars(parser.parse_args(arguments))


def main(arguments: list[str]) -> int:
    known = questions()
    if not arguments or arguments[0].startswith("-"):
        width = max(map(len, known))
        print(f"{__doc__}\n", *(f"{name:{width}}  {question}" for name, question in known.items()), sep="\n")
        return 0
    name, *given = arguments
    if name not in known:
        print(f"there is no study {name!r}. Try one of {', '.join(known)}.", file=sys.stderr)
        return 2
    study = importlib.import_module(f"studies.{name}")
    options = options_of(study, given)
    print(f"{known[name]}\n{machine()}", flush=True)
    is_met = print_table(study.rows(**options))
    if bar := getattr(study, "BAR", ""):
        print(f"\nBar: {bar}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
