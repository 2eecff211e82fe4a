"""`autotune-loader`: which command is meant, and the one place where exceptions and results become exit codes."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from autotune_loader import TunerError, __version__
from autotune_loader.cli import commands, tune_command
from autotune_loader.cli.parser import PROGRAM, Parser, UsageError
from autotune_loader.values import nearest
from autotune_loader.watch.run_plan import LEGIBLY

FINE, BAD_INPUT, INTERRUPTED = 0, 2, 130
"""2 is argparse's own for a wrong command line, 130 a shell's for SIGINT (128 + 2)."""
HELP = """\
Find the PyTorch DataLoader settings that keep a training loop fed, and measure
the speedup. Each command has its own --help:

  autotune-loader watch train.py --epochs 3      how long it waits for data
  autotune-loader run --allow-workers train.py   tune during training
  autotune-loader tune train.py:make_loader      tune before training
  autotune-loader check loader.json              does it fit this machine?
  autotune-loader show loader.json               print a result
  autotune-loader doctor                         limits, GPUs and versions
  autotune-loader demo                           tune a small training job"""
CODES = """\
Exit codes:
    0  fine
    2  bad input
    3  no setting worked; loader.json has PyTorch's defaults
    4  the training loop waits longer than --fail-if-wait allows
    5  check: the file was tuned on another machine
  130  interrupted; the best so far is written
Under watch and run, the exit code is that of the script."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.
    """
    returned = _returned(list(sys.argv[1:] if arguments is None else arguments))
    return returned if isinstance(returned, int) else returned() or FINE


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and that of each command."""
    hint = f"Options go after the command. See {PROGRAM} --help."
    parser = Parser(prog=PROGRAM, usage=f"{PROGRAM} COMMAND ...", description=HELP, epilog=CODES, hint=hint)
    parser.add_argument("--version", action="version", version=f"{PROGRAM}, version {__version__}")
    added = parser.add_subparsers(prog=PROGRAM, help=SUPPRESS)
    commands.add(added)
    tune_command.add(added)
    return parser, added.choices


def _returned(arguments: list[str]) -> int | Callable[[], Any]:
    """Do what is asked for; its exit code, or what runs a script, later, where nothing of ours is in its way."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and arguments[:1] not in (["watch"], ["run"]):  # they are the script's
            stream.reconfigure(errors=LEGIBLY)
    with warnings.catch_warnings():
        # Where in our code it was raised tells a user of the command line nothing.
        warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
        try:
            returned: int | Callable[[], Any] | None = _meant(arguments)()
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
    first, *rest = arguments or ["--help"]
    if first.startswith("-"):
        rest = []  # of which command?
    elif first not in known:
        near, is_script = nearest(first, known), first.endswith(".py") and Path(first).is_file()
        hint = f"Try {shlex.join([PROGRAM, 'watch', *arguments])}." if is_script else f"See {PROGRAM} --help."
        raise UsageError(f"unknown command {first!r}. {f'Did you mean {near!r}?' if near else hint}")
    try:
        options = vars(parser.parse_args([first, *rest]))
    except SystemExit:  # the help or the version is printed
        return lambda: None
    return partial(options.pop("run"), **options)
