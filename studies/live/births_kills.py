"""What is left, lost or stuck when a process of AutoLoader's births, or the training itself, is killed at a random moment?

Called by `python -m studies.live.births --only kills --kills 200`. A training of few short epochs, with two workers that are
not kept, says what it does; from outside its processes are killed one by one, each at a random moment of its start, of an
epoch or between two, until the training ends or is killed itself. A training that is alive must deliver each sample once, or
raise DataLoader's error; eight seconds after its end nothing of it may be there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from studies.endurance.kills import MARK, still_there
from studies.processes import ROOT

EPOCHS, SAMPLES, SIZE, WORKERS = 4, 200, 4, 2
NAMES = 20_000
"""Of the data, whose pickle no pipe holds."""
SAMPLE_S, BETWEEN_S = 0.01, 0.5
"""Waiting of a sample; most of the time between two epochs."""
MOMENTS_S = {"start": 1.5, "epoch": 1.0, "between": BETWEEN_S}
"""Phases of a training, and how long after the begin of one somebody is killed at most."""
ROLES = ("root", "nursery", "worker", "training")
TRAINING_SHARE = 0.2
"""Of the kills, while anybody else is there."""
HANG_S, LEFT_S = 60.0, 8.0
FAULTS = ("hangs", "wrong epochs", "crashes", "left behind")


@dataclass
class Tally:
    """What happened, over all trainings."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By role and phase."""
    figures: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)
    """Of each training that is not as it should be."""

    @property
    def is_bad(self) -> bool:
        return any(self.figures[name] for name in FAULTS)

    def faults(self) -> str:
        return ", ".join(f"{self.figures[name]} {name}" for name in FAULTS)

    def notes(self) -> list[str]:
        by_role = (f"{role} {self._in_phases(role)}" for role in ROLES)
        told = f"Kills by role ({', '.join(MOMENTS_S)}): {'; '.join(by_role)}."
        epochs = f"{self.figures['trainings']} trainings; {self.figures['raised']} epochs ended by an error."
        return [told, epochs, *self.stories]

    def _in_phases(self, role: str) -> str:
        return ", ".join(str(self.kills[role, phase]) for phase in MOMENTS_S)


def role_of(process: psutil.Process, training: int, workers: set[int]) -> str | None:
    """Who it is, by what can be seen from outside; None for the resource tracker, the fork server and who is gone.

    Workers are those that the training has had a batch from. Others are told by their command, and by their age: the first
    is the root, later ones are nurseries. Before a worker has delivered a batch it is taken for one of those, too.
    """
    if process.pid == training:
        return "training"
    if process.pid in workers:
        return "worker"
    with contextlib.suppress(psutil.Error):
        command, parent = " ".join(process.cmdline()), process.ppid()
        if "resource_tracker" in command or process.status() == psutil.STATUS_ZOMBIE:
            return None
        if parent != training:
            return "worker"  # of the fork server
        if "forkserver" in command:
            return None
        others = [each for each in psutil.Process(training).children() if is_other(each, workers)]
        first = min(others, key=lambda each: (each.create_time(), each.pid), default=process)
        return "root" if first.pid == process.pid else "nursery"
    return None


def is_other(process: psutil.Process, workers: set[int]) -> bool:
    """Whether a child of the training is neither a worker nor a process of `multiprocessing` itself."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return process.pid not in workers and "resource_tracker" not in command and "forkserver" not in command
    return False


class Training:
    """A training in a process of its own, which says what it does."""

    def __init__(self, method: str, mark: str, seed: int, errors: Any) -> None:
        self.mark, self.phase, self.workers, self.end = mark, "", set[int](), list[str]()
        self.heard_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__)), method, str(seed)], cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, *others = line.split()
            self.heard_at = time.monotonic()
            if word == "worker":
                self.workers.add(int(others[0]))
            elif word == "end":
                self.end = others
            else:
                self.phase = word

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def is_stuck(self) -> bool:
        """Whether it has said nothing for so long."""
        return self.is_running and time.monotonic() > self.heard_at + HANG_S

    def wait(self, until: Any) -> bool:
        """Whether it came to that while it ran."""
        while self.is_running and not self.is_stuck:
            if until():
                return True
            time.sleep(0.01)
        return False

    def close(self) -> list[int]:
        """End it, and whatever is left of it, which is told."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        left = still_there(self.mark, LEFT_S)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(1.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return left


def kill_births(count: int, seed: int, methods: Sequence[str]) -> Tally:
    """Kill so many processes of as many trainings as that takes; the start methods take turns."""
    rng, tally = random.Random(seed), Tally()
    while tally.kills.total() < count:
        number = tally.figures["trainings"]
        tally.figures["trainings"] += 1
        with tempfile.TemporaryFile("w+") as errors:
            mark = f"births-{os.getpid()}-{number}"
            training = Training(methods[number % len(methods)], mark, rng.randrange(1 << 30), errors)
            story = disturb(training, count, rng, tally)
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()]
        if story:
            tally.stories.append(
                f"training {number}, {methods[number % len(methods)]}: {story}; {' / '.join(said[-12:])}"
            )
        print(f"{tally.kills.total()} kills: {tally.faults()}", file=sys.stderr, flush=True)
    return tally


def disturb(training: Training, count: int, rng: random.Random, tally: Tally) -> str:
    """One training from its begin to its end; what was done, if that is not as it should be."""
    deeds, is_killed = list[str](), False
    while not is_killed and tally.kills.total() < count:
        phase = rng.choice(list(MOMENTS_S))
        if not training.wait(lambda: training.phase == phase):  # noqa: B023 - called before the next one
            break
        time.sleep(rng.uniform(0.0, MOMENTS_S[phase]))
        victim = choose(training, rng)
        if victim is None:
            break
        process, role = victim
        with contextlib.suppress(psutil.Error):
            phase = training.phase
            process.kill()
            tally.kills[role, phase] += 1
            deeds.append(f"{role} in {phase}")
            training.heard_at = time.monotonic()
            is_killed = role == "training"
    training.wait(lambda: False)
    is_stuck, code = training.is_stuck, training.process.poll()
    if is_stuck:
        training.process.send_signal(signal.SIGABRT)  # which prints its stack
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(5.0)
    left = training.close()
    wrong, raised = (int(each) for each in training.end or (0, 0))
    is_crashed = not (is_killed or is_stuck) and (code != 0 or not training.end)
    for name, count_of in zip((*FAULTS, "raised"), (is_stuck, wrong, is_crashed, len(left), raised), strict=True):
        tally.figures[name] += int(count_of)
    if not (is_stuck or wrong or is_crashed or left):
        return ""
    found = f"hangs {is_stuck}, wrong epochs {wrong}, exit code {code}, left {left}"
    return f"killed {', '.join(deeds) or 'nobody'}: {found}"


def choose(training: Training, rng: random.Random) -> tuple[psutil.Process, str] | None:
    """Somebody of a role that is there; the training, whose end is that of the run, is the least likely one."""
    by_role: dict[str, list[psutil.Process]] = {}
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(training.process.pid)
        for each in (root, *root.children(recursive=True)):
            role = role_of(each, root.pid, training.workers)
            if role is not None and each.is_running():
                by_role.setdefault(role, []).append(each)
    if not training.is_running or "training" not in by_role:
        return None
    births = sorted(set(by_role) - {"training"})
    role = rng.choice(births) if births and rng.random() > TRAINING_SHARE else "training"
    return rng.choice(by_role[role]), role


def train(method: str, seed: int) -> None:
    """The training that is disturbed. It says its phases, its workers, and at the end its wrong and its raised epochs."""
    from autotune_loader import AutoLoader
    from studies.live.births_jobs import Numbered

    faulthandler.enable()
    multiprocessing.set_start_method(method)
    rng, expected, wrong, raised = random.Random(seed), list(range(SAMPLES)), 0, 0
    loader = AutoLoader(Numbered(SAMPLES, NAMES, SAMPLE_S), batch_size=SIZE, num_workers=WORKERS, tune=False)
    for _ in range(EPOCHS):
        say("start")
        seen, told, is_whole = list[int](), set[int](), True
        try:
            for indices, pids in loader:
                if not seen:
                    say("epoch")
                seen += indices.tolist()
                for pid in set(pids.tolist()) - told:
                    told.add(pid)
                    say("worker", pid)
        except RuntimeError as error:  # DataLoader's of a worker that was killed
            print(f"raised: {error}", file=sys.stderr, flush=True)
            is_whole, raised = False, raised + 1
        say("between")
        wrong += seen != (expected if is_whole else expected[: len(seen)])
        time.sleep(rng.uniform(0.0, BETWEEN_S))
    say("end", wrong, raised)


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
