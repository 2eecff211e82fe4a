"""`autotune-loader`: the group of commands, and the one place where exceptions become exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from autotune_loader.cli.comparing import compare_command
from autotune_loader.cli.doctor import doctor_command
from autotune_loader.cli.exits import BAD_INPUT, FINE, INTERRUPTED
from autotune_loader.cli.files import apply_command, show_command
from autotune_loader.cli.watch import Launch, run_command, watch_command
from autotune_loader.cli.tuning import demo_command, tune_command
from autotune_loader.values.errors import TunerError
from autotune_loader.version import __version__

NAME = "autotune-loader"
"""Of the command, as pyproject.toml installs it; `python -m autotune_loader` has the same name."""


@click.group(name=NAME, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name=NAME)
@click.option("--traceback", is_flag=True, help="Show the whole traceback of an error, for a bug report.")
def cli(traceback: bool) -> None:
    """Find the cheapest DataLoader configuration that is as fast as this machine can be, and prove it.

    \b
    Examples:
      autotune-loader watch train.py --epochs 3          what your script's loaders cost it; nothing is changed
      autotune-loader run --workers train.py --epochs 3  tune them while it trains
      autotune-loader tune train.py:make -o loader.json  tune a loader before the training
      autotune-loader compare a.json b.json --job train.py:make   which of two settings is faster
      autotune-loader demo                               a real training job in small, start to finish
      autotune-loader show loader.json                   what was found, and whether it fits this machine
      autotune-loader apply loader.json --to snippet     code for your training script

    \b
    Exit codes:
        0  fine
        2  bad input
        3  nothing worked; loader.json holds torch's defaults
        4  a limit of yours was exceeded (--fail-if-wait, --fail-if-slower)
      130  interrupted; the best so far is written
    A script that is run ends with its own exit code.
    """  # noqa: D301 - click's mark is the character itself


_TUNING = (watch_command, run_command, tune_command, compare_command)
for _command in (*_TUNING, show_command, apply_command, doctor_command, demo_command):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.
    """
    returned = _parsed(list(sys.argv[1:] if arguments is None else arguments))
    if not isinstance(returned, Launch):
        return returned
    from autotune_loader.watch.launch import launch

    launch(returned.plan, returned.target, returned.arguments, is_module=returned.is_module)
    return FINE


def _parsed(arguments: list[str]) -> int | Launch:
    """Do what is asked for, and return its exit code; a script is run later, where nothing of ours is in its way."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        for stream in (sys.stdout, sys.stderr):
            _survive_any_encoding(stream, stack)
        warnings.showwarning = _show_warning
        try:
            returned = cli.main(arguments, prog_name=NAME, standalone_mode=False)
            return returned if isinstance(returned, (int, Launch)) else FINE
        except click.ClickException as error:
            error.show()
            return BAD_INPUT
        except (click.Abort, KeyboardInterrupt):
            click.echo("Interrupted.", err=True)
            return INTERRUPTED
        except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
            with contextlib.suppress(OSError, ValueError):  # or Python would complain when it flushes at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FINE
        except (TunerError, ValueError, TypeError) as error:
            if "--traceback" in arguments:
                raise
            click.echo(f"Error: {error}", err=True)
            return BAD_INPUT


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    """A warning as one line: where in our code it was raised tells a user of the command line nothing."""
    click.echo(f"Warning: {message}", err=True)


def _survive_any_encoding(stream: Any, stack: contextlib.ExitStack) -> None:
    """Let an ASCII terminal show "?" for a table's line instead of ending in an exception."""
    if hasattr(stream, "reconfigure"):
        with contextlib.suppress(ValueError):  # closed
            before = stream.errors
            stream.reconfigure(errors="replace")
            stack.callback(stream.reconfigure, errors=before)
