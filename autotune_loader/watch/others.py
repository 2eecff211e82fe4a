"""What the processes of a script saw of their loaders: each leaves it at its end, and the process of the command gathers it.

It goes through a folder that nobody else may enter, which the first process that has something to leave makes, and which goes
when it has been gathered.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
from dataclasses import dataclass
from pathlib import Path

from autotune_loader import TuningResult
from autotune_loader.diagnosis import Caution, Finding
from autotune_loader.report.script import LoaderReport, ScriptReport
from autotune_loader.watch.run_plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """What one process saw."""

    rank: int
    ranks: int
    report: ScriptReport
    result: TuningResult
    """Of the loader that most time was spent with."""

    @property
    def main(self) -> LoaderReport:
        return self.report.loaders[0]

    def too_long(self, plan: Plan) -> Finding | None:
        """What to say where the training loader was waited for longer than was allowed; a thread that reads ahead may wait."""
        share, most = self.main.wait_share, plan.most_waiting
        if share is None or most is None or share <= most or self.main.read_ahead is not None:
            return None
        name = f"{self.main.name}{f' of rank {self.rank}' if self.rank else ''}"
        return Caution.WAITS_TOO_LONG(name=name, share=share, most=most)


def leave(seen: ProcessReport, folder: str) -> bool:
    """Leave it for the process of the command; False where that cannot be."""
    part = Path(folder, f"{os.getpid()}-{uuid.uuid4().hex}.part")
    try:
        part.parent.mkdir(mode=0o700, exist_ok=True)
        part.write_bytes(pickle.dumps(seen))
        part.rename(part.with_suffix(".seen"))
    except Exception:  # a full disk, or something that cannot be sent: this process tells it itself
        return False
    return True


def gathered(folder: str) -> list[ProcessReport]:
    """What others have left since the last time; it is gone afterwards."""
    found: list[ProcessReport] = []
    for path in sorted(Path(folder).glob("*.seen")):
        with contextlib.suppress(Exception):
            found.append(pickle.loads(path.read_bytes()))  # noqa: S301 - our own processes, in a folder of ours
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # one may be leaving something right now
        Path(folder).rmdir()
    return found
