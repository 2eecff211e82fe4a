"""The command line. Commands parse, call, print and return an exit code; all they do can be done from Python too.

app (which command is meant) - commands (watch, run, show, demo) - tune_command (tune) - doctor - parser (argparse for all)
Nothing here imports torch before a command needs it: `autotune-loader --help` answers at once.
"""

from autotune_loader.cli.app import main

__all__ = ["main"]
