"""What is to be done with a script's loaders, as a value that the processes of the script hand on in their environment.

And how people are told of it: on stderr, so that stdout stays the script's own.
"""

from __future__ import annotations

import builtins
import codecs
import contextlib
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "AUTOTUNE_LOADER_SCRIPT"
"""Of the environment: the plan, for processes that the script starts."""
STARTUP = str(Path(__file__).with_name("startup"))
"""A folder whose `sitecustomize` Python imports when it starts, before anything of the script."""
LINE = "_autotune_loader_line"
"""Attribute of a loader: file and number of the line that made it."""
Verb = Literal["watch", "run"]
SHARE_AND_NEXT = re.compile(r"Training could win [^(]+(?= \()|waits for data \d+%|(?<=  )next: .*(?:\n {4}.*)*")
"""What a terminal shows in colour."""
LEGIBLY = "autotune_loader"
"""An error handler of `codecs`, for terminals that lack characters of our reports."""
IN_ASCII = {"─": "-", "–": "-", "±": "+-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line, or `enable()`, asked for. Paths are absolute: a script may change its folder."""

    verb: Verb
    script: str | None = None  # as it was named, with its arguments; None where no command line started it
    allow_workers: bool = False  # whether a loader that asked for no workers may have some
    max_workers: int | None = None  # of each loader
    start_with: str | None = None  # the loader.json to start with
    output: str | None = None  # where loader.json is written
    report: str | None = None  # where the report is written as JSON
    trace: str | None = None  # where the trace is written
    most_waiting: float | None = None  # share of waiting above which the exit code says so
    pid: int | None = None  # of the command, whose process tells of all others; None where each tells of itself
    folder: str | None = None  # where the others leave what they saw; the first one makes it

    @property
    def is_told_elsewhere(self) -> bool:
        """Whether another process, which is still there, tells what this one saw."""
        return self.pid not in (None, os.getpid()) and Path(f"/proc/{self.pid}").exists()

    def to_run(self, *, allow_workers: bool) -> str:
        """What tunes the same loaders: a command, the head of a cell, or a call in the script."""
        if self.script is None and "get_ipython" not in vars(builtins):
            return f'enable("run"{", allow_workers=True" if allow_workers else ""})'
        head = "%%watch run" if self.script is None else "autotune-loader run"
        return " ".join(filter(None, [head, "--allow-workers" if allow_workers else "", self.script]))

    def hand_on(self) -> None:
        """From now on the processes that this one starts do the same."""
        os.environ[VARIABLE] = json.dumps(asdict(self))
        paths = os.environ.get("PYTHONPATH", "")
        if STARTUP not in paths.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, [paths])])


def say(text: str, *, flushes: bool = True) -> None:
    """Print a text after what the script has printed, which is flushed; a stream that is closed already is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        if flushes:
            sys.stdout.flush()
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        if "NO_COLOR" not in os.environ and getattr(sys.stderr, "isatty", bool)():
            text = SHARE_AND_NEXT.sub("\033[1;36m\\g<0>\033[0m", text)
        print(text.encode(encoding, LEGIBLY).decode(encoding), file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # else what it holds back would make Python's exit code 120
    except (ValueError, AttributeError, RuntimeError):  # the last one within a signal handler, amid another print
        pass


def _replaced(error: Any) -> tuple[str, int]:
    return "".join(IN_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(LEGIBLY, _replaced)
