"""The command line. Commands parse, call, print and return an exit code.

    app.py           which command is meant; from exceptions and results to exit codes
    commands.py      `watch`, `run`, `check`, `show` and `demo`
    tune_command.py  `tune module:function`
    doctor.py        `doctor`: limits, GPUs and versions
    parser.py        argparse for all of them, whose errors say what to try

Nothing here imports torch before a command needs it: `autotune-loader --help` answers at once.
"""

from autotune_loader.cli.app import main

__all__ = ["main"]
