"""The parent's side of the probe: it starts the probe process, owns time and memory, and never lets a failure out.

    request ─► one child: loader, loop, Measurement ─► answer             the child is long-lived: it imports torch and warms
       wait for its answer, its end, or the deadline ─► Failure           the step up once; it is ended with all it started

A child that dies or hangs is killed with all its descendants; the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

import psutil

from autotune_loader.machine.facts import Machine
from autotune_loader.machine.memory_guard import MemoryGuard
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.child import Message, Request, receive, send, serve_forked, settings
from autotune_loader.probe.failures import failure_of_death, failure_of_memory_guard, is_device_broken
from autotune_loader.probe.forking import fork
from autotune_loader.probe.payload import NotSentError, Payload
from autotune_loader.probe.protocol import START_DEADLINE_S
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

log = logging.getLogger(__name__)
# A burst whose process has been told to end gets this long before it is killed.
STOP_GRACE_S = 0.5
STILL_RUNS = (subprocess.TimeoutExpired, psutil.TimeoutExpired)
# Of what a process that died has printed: the end of it holds the error, and C++ a long traceback behind it.
STDERR_TAIL_BYTES = 16384
# The path is set before anything is imported: a `dataclasses.py` beside the script is none of ours. The lifeline comes before
# torch: importing that takes seconds, in which the parent may end.
RUN = (
    "import sys; sys.path[:] = {path!r}; from autotune_loader.probe.lifeline import hold; hold({lifeline}, {scratch!r}); "
    "from autotune_loader.probe.child import main; main({connection}, {lifeline}, {data}, {training}, {settings!r})"
)


class ProcessProbe:
    """A `Probe` that runs every burst in a fresh process of its own.

    Args:
        source: the archived workload, which is the caller's to close, for processes that are started fresh; or the workload
            itself, for forks of this one.
        machine: limits of this machine; its usable cores are what shares are measured against.
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
        self.notes: tuple[str, ...] = ()

    def start(self) -> WarmupReport:
        """Start the process and wait until the workload is warm.

        Raises:
            NotSentError: the workload was pickled, but cannot be unpickled in another process.
            WorkloadError: dataset, model or step failed on the very first batch; carries the user's own traceback.
        """
        message = self._started()
        if message.ready is not None:
            return message.ready
        failure = message.failure
        assert failure is not None
        if failure.kind == "pickling" and failure.phase == "start":
            raise NotSentError("the workload", f"cannot be unpickled in another process: {failure.message}")
        raise WorkloadError(failure.message, failure.traceback or "")

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment with `config`.

        Raises:
            WorkloadError: too many samples of the dataset raise.
        """
        return self._run(Request(what="burst", plan=plan, config=config))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        return self._run(
            Request(what="step_ceiling", plan=plan, config=LoaderConfig(consumer_threads=consumer_threads))
        )

    def close(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _started(self) -> Message:
        """What a new child answers: that it is warm, or why not; then there is none."""
        self.close()
        child = self._child = _Child(self._source)
        try:
            message = child.ask(None, self._start_deadline_s)
        except BaseException:
            self.close()  # Ctrl-C: no orphan may outlive it
            raise
        if message.ready is None:
            self.close()
        return message

    def _run(self, request: Request) -> Measurement | Failure:
        if self._child is None and (failure := self._started().failure) is not None:
            return failure
        child = self._child
        assert child is not None
        try:
            outcome = self._metered(child, request)
        except BaseException:
            self.close()  # Ctrl-C: no orphan may outlive it
            raise
        if child.is_lost or is_device_broken(outcome):
            self.close()
        return outcome

    def _metered(self, child: _Child, request: Request) -> Measurement | Failure:
        over_budget = threading.Event()

        def on_memory_limit() -> None:
            over_budget.set()
            child.kill()

        with MemoryGuard(child.pid, self._memory_budget_bytes, on_memory_limit):
            message = child.ask(request, request.plan.deadline_s)
        if over_budget.is_set():
            child.is_lost = True  # also where the burst was over by then: the next one needs a new process
            return failure_of_memory_guard(request.config, self._memory_budget_bytes)
        if message.measurement is not None:
            return message.measurement
        assert message.failure is not None
        if message.ends_run:
            raise WorkloadError(message.failure.message, message.failure.traceback or "")
        return message.failure


class _Child:
    """One probe process and the connection to it."""

    def __init__(self, source: Payload | Workload) -> None:
        with contextlib.ExitStack() as held:  # given back at once where no process can start
            ours, theirs = map(held.enter_context, socket.socketpair())
            self._output: IO[bytes] = held.enter_context(tempfile.TemporaryFile())
            self._scratch = f"{tempfile.gettempdir()}/autotune-loader-{secrets.token_hex(4)}"
            held.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            lifeline_read, self._lifeline = os.pipe()
            held.callback(os.close, self._lifeline)
            self._process: subprocess.Popen[bytes] | psutil.Process
            try:
                if isinstance(source, Workload):
                    self._process = self._forked(source, theirs.fileno(), lifeline_read, ours.fileno())
                else:
                    self._process = self._spawned(source, theirs.fileno(), lifeline_read)
            finally:
                os.close(lifeline_read)
                theirs.close()
            self._connection = Connection(ours.detach())
            self._held = held.pop_all()
        # Workers inherit the connection, so a dead child does not close it while they live: its end is waited for, too.
        self._ends: list[int] = []
        # Where it has ended, or the kernel is older than 5.3, the connection tells alone.
        with contextlib.suppress(OSError):
            self._ends.append(os.pidfd_open(self.pid))
        self._phase: FailurePhase = "start"
        self.is_lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request | None, deadline_s: float) -> Message:
        """The answer to a request, or the first word of a new child; a failure where none comes in time or the process dies."""
        self._phase = "start"
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the child writes on at the same offset
        try:
            if request is not None:
                send(self._connection, request)
        except OSError:
            return self._death()
        deadline = time.monotonic() + deadline_s
        while heard := wait([self._connection, *self._ends], max(0.0, deadline - time.monotonic())):
            # It may have answered and died in between.
            if self._connection not in heard and not self._connection.poll(0):
                return self._death()
            try:
                message = receive(self._connection, Message)
            except (EOFError, OSError):
                return self._death()
            if message.phase is None:
                return message
            self._phase = message.phase
        return self._hang(deadline_s)

    def _hang(self, deadline_s: float) -> Message:
        self.is_lost = True
        message = f"no answer within {deadline_s:.0f} s, hanging in phase {self._phase!r}"
        traceback = self._last_words() or None
        return Message(failure=Failure(kind="deadline", phase=self._phase, message=message, traceback=traceback))

    def _death(self) -> Message:
        self.is_lost = True
        code = None
        with contextlib.suppress(*STILL_RUNS):
            code = self._process.wait(STOP_GRACE_S)
        return Message(failure=failure_of_death(code, self._phase, self._last_words()))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            output, size = self._output.fileno(), os.fstat(self._output.fileno()).st_size
            return os.pread(output, STDERR_TAIL_BYTES, max(0, size - STDERR_TAIL_BYTES)).decode(errors="replace")
        return ""

    def kill(self) -> None:
        """Kill the process and its descendants at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing: no process of the group, no descriptor, no file. Safe to call twice."""
        try:
            self._connection.close()
            if not self.is_lost:
                with contextlib.suppress(*STILL_RUNS):
                    self._process.wait(STOP_GRACE_S)
        finally:  # also when a second Ctrl-C comes
            self.kill()
            self._process.wait()
            while self._ends:
                os.close(self._ends.pop())
            self._held.close()

    def _spawned(self, payload: Payload, connection: int, lifeline: int) -> subprocess.Popen[bytes]:
        """A fresh interpreter with the flags of this one, which finds what this one finds."""
        descriptors = (connection, lifeline, payload.data.fd, payload.training.fd)
        path = [*(each for each in sys.path if isinstance(each, str)), str(Path(__file__).resolve().parents[2])]
        named = dict(zip(("connection", "lifeline", "data", "training"), descriptors, strict=True))
        run = RUN.format(path=path, scratch=self._scratch, settings=settings(), **named)
        return subprocess.Popen(
            [sys.executable, *util._args_from_interpreter_flags(), "-c", run],  # type: ignore[attr-defined]
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # a process group of its own, so that the whole tree can be ended
        )

    def _forked(self, workload: Workload, connection: int, lifeline: int, ours: int) -> psutil.Process:
        def live() -> None:
            for descriptor in (ours, self._lifeline):  # other ends, which a fork must not keep open
                os.close(descriptor)
            serve_forked(os.dup(connection), lifeline, workload, self._scratch)

        return fork(live, self._output.fileno())
