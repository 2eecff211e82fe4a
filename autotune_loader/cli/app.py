"""`autotune-loader`: which command is meant, and the one place where exceptions and results become exit codes."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from autotune_loader import TunerError, __version__
from autotune_loader.cli import commands, doctor, tune_command
from autotune_loader.cli.parser import PROGRAM, Parser, UsageError
from autotune_loader.values import nearest
from autotune_loader.watch.run_plan import LEGIBLY

FINE, BAD_INPUT, INTERRUPTED = 0, 2, 130
"""2 is argparse's own for a wrong command line, 130 a shell's for SIGINT (128 + 2)."""
ABOUT = """\
Find the PyTorch DataLoader settings that keep a training loop fed, and measure
the speedup. Each command has its own --help, with examples."""
CODES = """\
Examples:
  autotune-loader watch train.py --epochs 3
  autotune-loader run --allow-workers train.py
  autotune-loader tune train.py:make_loader

Exit codes:
    0  fine
    2  bad input
    3  no setting worked; loader.json has PyTorch's defaults
    4  the training loop waits longer than --fail-if-wait allows
    5  check: loader.json was tuned on another machine
  130  interrupted; the best so far is written
Under watch and run, the exit code is that of the script."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.
    """
    returned = _returned(list(sys.argv[1:] if arguments is None else arguments))
    if isinstance(returned, int):
        return returned
    returned()
    return FINE


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and that of each command."""
    parser = Parser(prog=PROGRAM, description=ABOUT, epilog=CODES)
    parser.add_argument("--version", action="version", version=f"{PROGRAM}, version {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands.add_script_commands(added)
    tune_command.add(added)
    commands.add_file_commands(added)
    doctor.add(added)
    return parser, added.choices


def _returned(arguments: list[str]) -> int | Callable[[], None]:
    """Do what is asked for; its exit code, or what runs a script, later, where nothing of ours is in its way."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and arguments[:1] not in (["watch"], ["run"]):  # they are the script's
            stream.reconfigure(errors=LEGIBLY)
    with warnings.catch_warnings():
        # Where in our code it was raised tells a user of the command line nothing.
        warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
        try:
            returned: int | Callable[[], None] | None = _meant(arguments)()
            print(end="", flush=True)
            return returned or FINE
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
            with contextlib.suppress(OSError, ValueError):  # or Python would complain when it flushes at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FINE
        except (TunerError, UsageError) as error:
            print(f"Error: {error}", file=sys.stderr)
            return BAD_INPUT


def _meant(arguments: Sequence[str]) -> Callable[[], Any]:
    parser, known = make_parser()
    first = next(iter(arguments), "--help")
    if first not in (*known, *parser.options):
        raise UsageError(_unknown(first, arguments, known))
    try:
        options = vars(parser.parse_args(arguments or ["--help"]))
    except SystemExit:  # the help or the version is printed
        return lambda: None
    return partial(options.pop("run"), **options)


def _unknown(first: str, arguments: Sequence[str], known: dict[str, Parser]) -> str:
    if first.startswith("-"):
        return f"unknown option {first}. Options go after the command. See {PROGRAM} --help."
    hint = f"See {PROGRAM} --help."
    if (near := nearest(first, known)) is not None:
        hint = f"Did you mean {near!r}?"
    elif first.endswith(".py") and Path(first).is_file():
        hint = f"Try {shlex.join([PROGRAM, 'watch', *arguments])}."
    return f"unknown command {first!r}. {hint}"
