"""The parser of every command: argparse, whose errors say what to try."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

from autotune_loader.values import nearest

PROGRAM = "autotune-loader"
BUDGET = "Most wall time for trials, such as 60s or 3m.  [default: {}]"
"""The help of `--budget`."""
Option: TypeAlias = "tuple[tuple[str, ...], dict[str, Any]]"
_Run = TypeVar("_Run", bound=Callable[..., Any])


def option(*names: str, **described: Any) -> Option:
    """The arguments of argparse's `add_argument`."""
    return names, described


class Command(argparse.ArgumentParser):
    """Makes a command of the function that it decorates: its docstring is the help, and it gets an argument for each option.

    Args:
        name: of the command.
        options: as `option` makes them.
        script: what the arguments of a script come after, such as "train.py"; empty where there is none. Those after "--" are
            no options of the command, and the function gets them as `arguments`.
    """

    all: dict[str, Command] = {}  # noqa: RUF012 - by name
    run: Callable[..., Any]

    def __init__(self, name: str, *options: Option, script: str = "") -> None:
        super().__init__(f"{PROGRAM} {name}", allow_abbrev=False)
        self.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=80)
        self.all[name], self._script = self, script
        actions = [self.add_argument(*names, **described) for names, described in options]
        self.options = [name for each in actions for name in each.option_strings]

    def __call__(self, run: _Run) -> _Run:
        """Decorate the function."""
        self.run, self.description = run, inspect.getdoc(run)
        return run

    def parsed(self, arguments: Sequence[str]) -> Callable[[], Any]:
        """What runs the command.

        Raises:
            ValueError: it has no such arguments; the message suggests some.
        """
        is_split = self._script.endswith("--")
        end = [*arguments, "--"].index("--") if is_split else len(arguments)
        try:
            known, unknown = self.parse_known_args(arguments[:end])
        except SystemExit:  # the help is told
            return lambda: None
        if not unknown:
            return partial(self.run, **vars(known), **({"arguments": arguments[end + 1 :]} if is_split else {}))
        name = unknown[0].partition("=")[0]
        hint = f"See {self.prog} --help for all options."
        if self._script:
            hint = f"An argument of the script goes after its name: {self.prog} {self._script} {name}"
        near = nearest(name, self.options, cutoff=0.75)
        raise ValueError(f"unknown option {name}. {hint if near is None else f'Did you mean {near}?'}")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        example = f"Try {self.prog} {self._script.removesuffix(' --')}." if "required" in message else ""
        raise ValueError(f"{message}. {example or f'See {self.prog} --help for examples.'}")


def count(text: str, least: int) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= {least}")
    return int(text)
