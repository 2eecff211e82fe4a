"""argparse for every command, whose errors say what to try."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from autotune_loader.values import nearest

PROGRAM = "autotune-loader"


class UsageError(Exception):
    """The command line is wrong, or an argument on it: one line for the user, without a traceback."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError or TypeError that our code raises of an argument is a UsageError; one of a library stays itself."""
    try:
        yield
    except (ValueError, TypeError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("autotune_loader."):
            raise UsageError(str(error)) from error
        raise


class Parser(argparse.ArgumentParser):
    """A parser that raises what argparse would print, names the nearest option, or else gives a hint.

    With `rest`, what follows "--" is no option, but returned under that name.
    """

    def __init__(self, *, hint: str = "", rest: str = "", **options: Any) -> None:
        self.options = list[str]()
        as_written = partial(argparse.RawDescriptionHelpFormatter, width=80)
        super().__init__(allow_abbrev=False, formatter_class=as_written, **options)
        self._hint, self._rest = hint or f"See {self.prog} --help for all options.", rest

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse, and the option is one to be suggested."""
        action = super().add_argument(*names, **options)
        self.options += action.option_strings
        return action

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse, but what is left is an error."""
        given = list(args or ())
        end = given.index("--") if self._rest and "--" in given else len(given)
        known, unknown = super().parse_known_args(given[:end], namespace)
        if self._rest:
            setattr(known, self._rest, given[end + 1 :])
        if unknown:
            name = unknown[0].partition("=")[0]
            alike = [each for each in self.options if each.endswith(name.lstrip("-")) and len(name) > 3]
            near = " or ".join(sorted(alike)) or nearest(name, self.options, cutoff=0.75)
            raise UsageError(f"unknown option {name}. {self._hint if near is None else f'Did you mean {near}?'}")
        return known, []

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message}. See {self.prog} --help.")


def add_command(commands: Any, name: str, run: Callable[..., Any], **options: Any) -> Parser:
    """Add a command, whose help is the docstring of the function that runs it; that gets an argument for each option."""
    command: Parser = commands.add_parser(name, description=inspect.getdoc(run), **options)
    command.set_defaults(run=run)
    return command


def count(text: str, least: int) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= {least}")
    return int(text)
