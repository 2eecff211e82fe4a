"""The parent's side of the probe: it starts the probe process, owns time and memory, and never lets a failure out.

The process is long-lived: it imports torch and warms the step up once. When it dies or hangs it is killed with all its
descendants, what happened is told as a `Failure`, and the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple

from autotune_loader.machine.facts import Machine
from autotune_loader.machine.meters.process_tree import TreeMeter
from autotune_loader.machine.processes import process_group_members
from autotune_loader.machine.shm import remove_segments_of, segments
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe import wire
from autotune_loader.probe.bench import WarmupReport, gpus_of
from autotune_loader.probe.child import serve_forked
from autotune_loader.probe.failures import failure_of_death, failure_of_memory_guard, is_device_broken
from autotune_loader.probe.forking import Fork
from autotune_loader.probe.payload import Payload, UnpicklableError
from autotune_loader.probe.protocol import START_DEADLINE_S
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

log = logging.getLogger(__name__)
# A process that has not read a byte for so long hangs before it serves (an import that waits, say).
SEND_DEADLINE_S = 60
# A burst whose process has been told to end gets this long before it is killed.
STOP_GRACE_S = 0.5
# Workers inherit the connection, so a dead probe process does not close it while they live: its death is looked for too.
DEATH_CHECK_S = 0.2
# Of what a process that died has printed: the end of it holds the error.
STDERR_TAIL_BYTES = 4096


class ProcessProbe:
    """A `Probe` that runs every burst in a fresh process of its own.

    Args:
        source: the archived workload, which is the caller's to close, for processes that are started fresh; or the workload
            itself, for forks of this one.
        machine: limits of this machine; its usable cores and GPUs are what shares are measured against.
        memory_budget_bytes: a burst whose process tree grows past 90 % of it is aborted; None sets no limit.
        start_deadline_s: importing torch, unpickling, the first batch and the warm-up must be done by then.
    """

    def __init__(
        self,
        source: Payload | Workload,
        machine: Machine,
        *,
        memory_budget_bytes: int | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self._source = source
        self._machine = machine
        self._memory_budget_bytes = memory_budget_bytes
        self._start_deadline_s = start_deadline_s
        self._child: _Child | None = None

    def start(self) -> WarmupReport:
        """Start the process and wait until the workload is warm.

        Raises:
            UnpicklableError: the workload was pickled, but cannot be unpickled in another process.
            WorkloadError: dataset, model or step failed on the very first batch; carries the user's own traceback.
        """
        outcome = self._started_child()
        if isinstance(outcome, Failure) and outcome.kind == "pickling" and outcome.phase == "start":
            raise UnpicklableError("the workload", outcome.message, "unpickled in another process")
        if isinstance(outcome, Failure):
            raise WorkloadError(outcome.message, outcome.traceback or "")
        assert outcome.warmup is not None
        return outcome.warmup

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment with `config`.

        Raises:
            WorkloadError: too many samples of the dataset raise.
        """
        return self._run(wire.Request(what="burst", plan=plan, config=config))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        config = LoaderConfig(consumer_threads=consumer_threads)
        return self._run(wire.Request(what="step_ceiling", plan=plan, config=config))

    def close(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _started_child(self) -> _Child | Failure:
        if self._child is not None:
            return self._child
        child = self._child = _Child(self._source)
        try:
            failure = child.wait_until_ready(self._start_deadline_s)
        except BaseException:
            self.close()  # Ctrl-C: no orphan may outlive it
            raise
        if failure is None:
            return child
        self.close()
        return failure

    def _run(self, request: wire.Request) -> Measurement | Failure:
        child = self._started_child()
        if isinstance(child, Failure):
            return child
        try:
            outcome = self._metered(child, request)
        except BaseException:
            self.close()  # Ctrl-C: no orphan may outlive it
            raise
        if child.is_lost or is_device_broken(outcome):
            self.close()
        return outcome

    def _metered(self, child: _Child, request: wire.Request) -> Measurement | Failure:
        over_budget = threading.Event()

        def on_memory_limit() -> None:
            over_budget.set()
            child.kill()

        meter = TreeMeter(
            child.pid,
            usable_cores=self._machine.usable_cores,
            memory_budget_bytes=self._memory_budget_bytes,
            on_memory_limit=on_memory_limit,
            gpus=gpus_of(child.warmup.device_uuid if child.warmup is not None else None),
        )
        with meter:
            outcome = child.ask(request)
        if over_budget.is_set():
            child.is_lost = True  # also where the burst was over by then: the next one needs a new process
            return failure_of_memory_guard(request.config, self._memory_budget_bytes)
        if not isinstance(outcome, Measurement):
            return outcome
        return meter.added_to(outcome)


class _Child:
    """One probe process and the connection to it."""

    def __init__(self, source: Payload | Workload) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._scratch = tempfile.mkdtemp(prefix="autotune-loader-")
        self._segments_before = segments()
        self._is_forked = isinstance(source, Workload)
        with theirs:
            ends = _Ends(theirs.fileno(), lifeline_read, (ours.fileno(), self._lifeline))
            self._process = (
                _forked(source, ends, self._scratch, self._output)
                if isinstance(source, Workload)
                else _spawned(source, ends, self._scratch, self._output)
            )
        os.close(lifeline_read)
        # Without a timeout a process that hangs before it reads would block us.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_DEADLINE_S, 0))
        self._connection = Connection(ours.detach())
        self._phase: FailurePhase = "start"
        self.warmup: WarmupReport | None = None
        self.is_lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, deadline_s: float) -> Failure | None:
        try:
            if not self._is_forked:
                wire.send(self._connection, _hello())
        except BlockingIOError:
            return self._hang(SEND_DEADLINE_S)
        except OSError:
            return self._death()
        message = self._answer(deadline_s)
        if isinstance(message, Failure):
            return message
        self.warmup = message.ready
        return message.failure

    def ask(self, request: wire.Request) -> Measurement | Failure:
        self._phase = "start"
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the child writes on at the same offset
        try:
            wire.send(self._connection, request)
        except OSError:
            return self._death()
        message = self._answer(request.plan.deadline_s)
        if isinstance(message, Failure):
            return message
        outcome = message.measurement or message.failure
        assert outcome is not None
        if message.ends_run and message.failure is not None:
            raise WorkloadError(message.failure.message, message.failure.traceback or "")
        return outcome

    def _answer(self, deadline_s: float) -> wire.Message | Failure:
        """The next message that is not about a phase; a failure when none comes in time or the process dies."""
        deadline = time.monotonic() + deadline_s
        while True:
            if not self._hears_something(deadline):
                return self._death() if self._process.poll() is not None else self._hang(deadline_s)
            try:
                message = wire.receive(self._connection, wire.Message)
            except (EOFError, OSError):
                return self._death()
            if message.phase is None:
                return message
            self._phase = message.phase

    def _hears_something(self, deadline: float) -> bool:
        """Whether a message (or the end of the connection) came before the deadline and before the process ended."""
        while not self._connection.poll(min(DEATH_CHECK_S, max(0.0, deadline - time.monotonic()))):
            if self._process.poll() is not None:
                return self._connection.poll(0)  # it may have answered and died in between
            if time.monotonic() >= deadline:
                return False
        return True

    def _hang(self, deadline_s: float) -> Failure:
        self.is_lost = True
        return Failure(
            kind="deadline",
            phase=self._phase,
            message=f"no answer within {deadline_s:.0f} s, hanging in phase {self._phase!r}",
            traceback=self._last_words() or None,
        )

    def _death(self) -> Failure:
        self.is_lost = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        return failure_of_death(self._process.poll(), self._phase, self._last_words())

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self._output.fileno()).st_size
            return os.pread(self._output.fileno(), STDERR_TAIL_BYTES, max(0, size - STDERR_TAIL_BYTES)).decode(
                errors="replace"
            )
        return ""

    def kill(self) -> None:
        """Kill the process and its descendants at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing: no process of the group, no descriptor, no shared-memory segment, no file."""
        members = process_group_members(self.pid)
        try:
            self._connection.close()
            if not self.is_lost:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_GRACE_S)
        finally:  # also when a second Ctrl-C comes
            self.kill()
            self._process.wait()
            os.close(self._lifeline)
            self._output.close()
            remove_segments_of({*members, self.pid}, self._segments_before)
            shutil.rmtree(self._scratch, ignore_errors=True)


class _Ends(NamedTuple):
    """Descriptors of a new child."""

    connection: int
    lifeline: int
    ours: tuple[int, ...]
    """Other ends, which a fork must not keep open."""


def _spawned(payload: Payload, ends: _Ends, scratch: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A fresh interpreter with the flags of this one, which finds what this one finds."""
    descriptors = (ends.connection, ends.lifeline, payload.data.fd, payload.training.fd)
    path = [*(each for each in sys.path if isinstance(each, str)), str(Path(__file__).resolve().parents[2])]
    # Set before anything is imported: a `dataclasses.py` beside the script is none of ours.
    run = f"from autotune_loader.probe.child import main; main(*{descriptors}, {scratch!r})"
    return subprocess.Popen(
        [sys.executable, *util._args_from_interpreter_flags(), "-c", f"import sys; sys.path[:] = {path!r}; {run}"],  # type: ignore[attr-defined]
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # a process group of its own, so that the whole tree can be ended
    )


def _forked(workload: Workload, ends: _Ends, scratch: str, output: IO[bytes]) -> Fork:
    def live() -> None:
        for descriptor in ends.ours:
            os.close(descriptor)
        serve_forked(os.dup(ends.connection), ends.lifeline, workload, scratch)

    return Fork(live, output.fileno())


def _hello() -> wire.Hello:
    import torch

    from autotune_loader.probe.torch_state import read_torch_state

    return wire.Hello(
        threads=torch.get_num_threads(),
        start_method=multiprocessing.get_start_method(allow_none=True),
        torch_state=read_torch_state(),
    )
