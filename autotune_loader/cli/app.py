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
from typing import Any

from autotune_loader import TunerError, __version__
from autotune_loader.cli import commands, doctor, tune_command  # noqa: F401 - each adds its commands
from autotune_loader.cli.parser import PROGRAM, Command
from autotune_loader.values import nearest
from autotune_loader.watch.run_plan import LEGIBLY

FINE, BAD_INPUT, INTERRUPTED = 0, 2, 130
"""2 is argparse's own for a wrong command line, 130 a shell's for SIGINT (128 + 2)."""
HELP = """\
usage: autotune-loader COMMAND ...

Find the PyTorch DataLoader settings that keep a training loop fed, and measure
the speedup. Each command has its own --help:

  autotune-loader watch train.py --epochs 3      how long it waits for data
  autotune-loader run --allow-workers train.py   tune during training
  autotune-loader tune train.py:make_loader      tune before training
  autotune-loader show loader.json               print a result
  autotune-loader doctor                         limits, GPUs and versions
  autotune-loader demo                           tune a small training job
  autotune-loader --version

Exit codes:
    0  fine
    2  bad input
    3  no setting worked; loader.json has PyTorch's defaults
    4  the training loop waits longer than --fail-if-wait allows
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
        except (TunerError, ValueError, TypeError) as error:
            print(f"Error: {error}", file=sys.stderr)
            return BAD_INPUT


def _meant(arguments: Sequence[str]) -> Callable[[], Any]:
    first, *rest = arguments or ["--help"]
    if first in Command.all:
        return Command.all[first].parsed(rest)
    if first in ("-h", "--help"):
        return partial(print, HELP)
    if first == "--version":
        return partial(print, f"{PROGRAM}, version {__version__}")
    named = next((each for each in rest if each in Command.all), None)
    if first.startswith("-") and named is not None:
        moved = shlex.join([PROGRAM, named, first, *(each for each in rest if each != named)])
        raise ValueError(f"{first} goes after the command: {moved}")
    meant = ("watch", first) if first.endswith(".py") else (nearest(first, Command.all),)
    works = shlex.join([PROGRAM, *meant, *rest]) if meant[0] else f"{PROGRAM} --help"
    raise ValueError(f"there is no command {first!r}. Try {works}.")
