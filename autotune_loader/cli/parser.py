"""The parser of every command: argparse, whose errors say what would work."""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

PROGRAM = "autotune-loader"
_Run = TypeVar("_Run", bound=Callable[..., Any])


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        name: of the command.
        run: is given an argument for each option; its docstring is the help.
        script: what the arguments of a script come after, such as "train.py"; empty where there is none. Those after "--" are
            no options of the command, and `run` is given them as `arguments`.
    """

    def __init__(self, name: str, run: Callable[..., Any], script: str) -> None:
        super().__init__(f"{PROGRAM} {name}", description=inspect.getdoc(run), allow_abbrev=False)
        self.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=80)
        self.options = list[str]()
        self._run, self._script = run, script

    def parsed(self, arguments: Sequence[str]) -> Callable[[], Any]:
        """What runs the command.

        Raises:
            ValueError: it has no such arguments; the message says what would work.
        """
        is_split = self._script.endswith("--")
        end = [*arguments, "--"].index("--") if is_split else len(arguments)
        try:
            known, unknown = self.parse_known_args(arguments[:end])
        except SystemExit:  # the help is told
            return lambda: None
        if not unknown:
            return partial(self._run, **vars(known), **({"arguments": arguments[end + 1 :]} if is_split else {}))
        name = unknown[0].partition("=")[0]
        works = f"an argument of the script goes after its name: {self.prog} {self._script} {name}"
        works = works if self._script else f"{self.prog} --help has all"
        near = difflib.get_close_matches(name, self.options, n=1)
        raise ValueError(f"{self.prog} takes no {name}; {f'did you mean {near[0]}?' if near else works}")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        works = f"{self.prog} {self._script.removesuffix(' --')} would work"
        raise ValueError(f"{message}; {works if 'required' in message else f'{self.prog} --help has examples'}")


COMMANDS: dict[str, CommandParser] = {}
"""By their names."""


def option(*names: str, **described: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of argparse's `add_argument`."""
    return names, described


def command(name: str, *options: tuple[tuple[str, ...], dict[str, Any]], script: str = "") -> Callable[[_Run], _Run]:
    """Make a function a command, as `CommandParser` says."""

    def made(run: _Run) -> _Run:
        COMMANDS[name] = parser = CommandParser(name, run, script)
        for names, described in options:
            parser.options += parser.add_argument(*names, **described).option_strings
        return run

    return made


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def counted(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= {least}")
        return int(text)

    return counted
