"""`autotune-loader`: the group of commands, and the one place where exceptions and results become exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence

import click

from autotune_loader import TunerError, __version__
from autotune_loader.cli.doctor import doctor_command
from autotune_loader.cli.show import show_command
from autotune_loader.cli.tune_command import demo_command, tune_command
from autotune_loader.cli.watch import run_command, watch_command

# 2 is click's own for a wrong command line, 130 a shell's for SIGINT (128 + 2).
FINE, BAD_INPUT, NOTHING_WORKED, INTERRUPTED = 0, 2, 3, 130
OF_STATUS = {"fallback": NOTHING_WORKED, "partial": INTERRUPTED}
"""Exit codes of results that are not what was asked for."""


@click.group(name="autotune-loader", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Find the fewest DataLoader workers that keep a training loop fed, and measure what they bring.

    \b
    Examples:
      autotune-loader watch train.py --epochs 3   what its loaders cost
      autotune-loader run --workers train.py      tune them while it trains
      autotune-loader tune train.py:make_loader   tune before the training
      autotune-loader show loader.json            what was found
      autotune-loader doctor                      what this machine allows
      autotune-loader demo                        a small real job

    \b
    Exit codes:
        0  fine
        2  bad input
        3  nothing worked; loader.json holds torch's defaults
        4  the loop waited for longer than --fail-if-wait allows
      130  interrupted; the best so far is written
    A script that is run ends with its own exit code.
    """  # noqa: D301 - click's mark is the character itself


for _command in (watch_command, run_command, tune_command, show_command, doctor_command, demo_command):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.
    """
    returned = _parsed(list(sys.argv[1:] if arguments is None else arguments))
    if isinstance(returned, int):
        return returned
    returned()
    return FINE


def _parsed(arguments: list[str]) -> int | Callable[[], None]:
    """Do what is asked for, and return its exit code; a script is run later, where nothing of ours is in its way.

    A command returns nothing, the status of a result, or what runs a script.
    """
    with warnings.catch_warnings():
        # Where in our code it was raised tells a user of the command line nothing.
        warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
        try:
            returned = cli.main(arguments, prog_name=cli.name, standalone_mode=False)
            return returned if callable(returned) or isinstance(returned, int) else OF_STATUS.get(str(returned), FINE)
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
            click.echo(f"Error: {error}", err=True)
            return BAD_INPUT
