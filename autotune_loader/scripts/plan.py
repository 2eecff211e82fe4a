"""What is to be done with a script's loaders, as a value that the processes of the script hand on in their environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

VARIABLE = "AUTOTUNE_LOADER_SCRIPT"
"""Of the environment: the plan, for processes that the script starts."""
STARTUP = str(Path(__file__).with_name("startup"))
"""A folder whose `sitecustomize` Python imports when it starts, before anything of the script."""
Verb = Literal["watch", "run", "tune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line, or `enable()`, asked for. Paths are absolute: a script may change its folder."""

    verb: Verb
    script: str | None = None
    """As it was named; None where it is not the command line that started it."""
    output: str | None = None
    """Where `loader.json` is written."""
    apply: str | None = None
    """The `loader.json` to start with."""
    page: str | None = None
    """Where the HTML page is written."""
    as_json: bool = False
    most_waiting: float | None = None
    """Share of waiting above which the exit code says so."""
    budget_s: float | None = None
    """Seconds after which `tune` ends the script."""
    max_workers: int | None = None
    folder: str | None = None
    """Where processes of the script leave what others of them read: their reports, and what ranks waited."""
    pid: int | None = None
    """Of the script's own process, which removes the folder; it may go on as another program (`os.execv`)."""

    def hand_on(self) -> None:
        """From now on the processes that this one starts do the same; none of them is ended before its time."""
        handed = replace(self, verb="run") if self.verb == "tune" else self
        os.environ[VARIABLE] = json.dumps(asdict(handed))
        paths = os.environ.get("PYTHONPATH", "")
        if STARTUP not in paths.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, [paths])])

    @classmethod
    def handed_on(cls) -> Plan | None:
        """The plan of the process that started this one; None where there is none."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))
