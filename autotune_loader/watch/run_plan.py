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
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "AUTOTUNE_LOADER_SCRIPT"
"""Of the environment: the plan, for processes that the script starts."""
ASKED = "AUTOTUNE_LOADER"
"""Of the environment: what the user asks for where a launcher has the command line."""
FILES = {"-o": "output", "--json": "report"}
"""Options of it."""
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
    script: str | None = None  # as it was named, with its arguments; None after `enable()`, "" by the environment
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
        """What tunes the same loaders: a command, a variable, the head of a cell, or a call in the script."""
        verb = "run --allow-workers" if allow_workers else "run"
        if self.script:
            return f"autotune-loader {verb} {self.script}"
        if self.script is not None:
            return f"{ASKED}={shlex.quote(verb)}"
        if "get_ipython" in vars(builtins):
            return f"%%watch {verb}"
        return f'enable("run"{", allow_workers=True" if allow_workers else ""})'

    @classmethod
    def asked(cls, text: str) -> Plan:
        """What `AUTOTUNE_LOADER` asks for: a verb with its options, such as "run --allow-workers -o loader.json".

        Raises:
            ValueError: There is no such verb or option.
        """
        try:
            verb, *words = shlex.split(text) or [""]
        except ValueError:  # a quote without an end
            verb, words = "", []
        allow_workers = verb == "run" and "--allow-workers" in words
        if allow_workers:
            words.remove("--allow-workers")
        files = dict(zip(words[::2], words[1::2], strict=False))
        if verb not in ("watch", "run") or len(words) % 2 or not files.keys() <= FILES.keys():
            raise ValueError(f"{ASKED}={text!r} is not known. Try {ASKED}=watch or {ASKED}='run --allow-workers'.")
        paths: dict[str, Any] = {FILES[name]: str(Path(path).absolute()) for name, path in files.items()}
        return cls(verb=verb, script="", allow_workers=allow_workers, **paths)  # type: ignore[arg-type]  # one of them

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
        if _is_coloured(sys.stderr):
            text = SHARE_AND_NEXT.sub("\033[1;36m\\g<0>\033[0m", text)
        print(text.encode(encoding, LEGIBLY).decode(encoding), file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # else what it holds back would make Python's exit code 120
    except (ValueError, AttributeError, RuntimeError):  # the last one within a signal handler, amid another print
        pass


def _is_coloured(stream: Any) -> bool:
    """As https://no-color.org and https://force-color.org say."""
    off, on = os.environ.get("NO_COLOR"), os.environ.get("FORCE_COLOR")
    if off or on:
        return not off
    return os.environ.get("TERM") != "dumb" and getattr(stream, "isatty", bool)()


def _replaced(error: Any) -> tuple[str, int]:
    return "".join(IN_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(LEGIBLY, _replaced)
