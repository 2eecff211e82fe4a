"""The caller's side of a probe: it starts the process of the bursts and sets its limits of time and memory.

    request ─► child: loader, loop, Measurement ─► answer          the child is long-lived: it imports torch and warms
       wait for its answer, its end, or the deadline ─► Failure    the step up once; it is killed with all that it started

A child that dies or hangs is killed with its group; the next request starts a new one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

import psutil
import torch

from autotune_loader.bursts import child
from autotune_loader.bursts.failures import ENDS_TRAINING, MEMORY_ADVICE, failure_of_death, needs_new_process
from autotune_loader.bursts.files import environment, link_temporary_files
from autotune_loader.bursts.packing import NotSentError, Packed, packed, part_at_fault, why_not_sent
from autotune_loader.bursts.protocol import Allowance, Message, Request, WarmupReport, receive, send
from autotune_loader.bursts.settings import Settings
from autotune_loader.machine.elsewhere import FIRST_OWN_FD, ended_with_us, remove, scratch_root
from autotune_loader.machine.facts import Machine, start_method
from autotune_loader.machine.kernel import pidfd
from autotune_loader.machine.processes import memory_guarded
from autotune_loader.pipeline.batches import accelerator
from autotune_loader.pipeline.workload import Workload
from autotune_loader.values import BurstPlan, Failure, FailurePhase, LoaderConfig, Measurement, MemoryUse, WorkloadError
from autotune_loader.values.units import bytes_text

START_DEADLINE_S, FORK_DEADLINE_S = 120.0, 15.0
"""Torch may come from a network file system, and a model may be compiled; a fork that hangs on a lock of the caller's does so
at once."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it `torch.cuda.is_available()`, which many modules call when they are imported, leaves forks able to use CUDA."""
ANEW = 3.0
"""A burst without workers may unpickle the data anew, and warm the step up: what was done in the start is done in so many times
its seconds."""
DEATH_S = 0.5
"""A process whose connection has ended is gone within this time, and then tells how."""
PAYLOAD_MEMORY_SHARE, LARGEST_PAYLOAD_BYTES = 0.3, 8 << 30
"""What is sent is in memory once more. It may take this share of what is available, and no more than is copied in seconds."""
LAST_WORDS_BYTES = 16384
"""Of what a process that died has printed; C++ prints a long traceback behind the error."""
RUN = (
    "import sys; sys.path[:] = {path!r}; "
    "from autotune_loader.machine.elsewhere import die_with_parent; die_with_parent({parent}); "
    "from autotune_loader.bursts.files import confine; notes = confine(); "
    "from autotune_loader.bursts.child import main; main({connection}, {fds}, {seed}, {allowed}, notes)"
)
"""The path is set before anything is imported: a `dataclasses.py` beside the script may be first on it. Torch, and all that is
the user's, is imported once the process is confined."""
FORKED = "The trials run in forks of this process, where a step on the CPU uses one thread: {reason}."
UNSENT = (
    "No worker that {method} starts can be sent the {fault}, in training neither, so none are tried (num_workers=0). Make on "
    "first use in each process what cannot be pickled. Try multiprocessing_context='fork'."
)
HANGS = "no answer within"
UNLIKE = (
    "in a fresh process, which has what modules register as they are imported, and not all that the script has: codecs, for "
    "one, are to be registered in the module of the dataset"
)
NEITHER = (
    "{part} cannot be sent to another process ({reason}), and a fork of this process cannot read it ({fork}): make it on "
    "first use in each process"
)
THREADS = (
    "a trial in a fork of this process failed ({message}). Threads of this process ({names}) do not run in a fork, and a step "
    "that hands rows to one, as to a logger, waits forever: leave saving and logging out of the step"
)
OVER_BUDGET = f"{{config}} took more than 90% of the memory budget of {{budget}} and was stopped; {MEMORY_ADVICE}"
NO_ROOM = (
    "a second copy of the model on {device} takes at least {needed:.1f} GB, and {free:.1f} GB are free: move it to the CPU "
    "until the training begins, or tune the loader against a step of 0.05 s with train_step=0.05"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProbe:
    """A warm probe, what is known of the workload, and what the user should know about how it runs."""

    probe: ProcessProbe
    warmup: WarmupReport
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def open_probe(
    workload: Workload,
    machine: Machine,
    memory_budget_bytes: int | None,
    *,
    budget_s: float = 0.0,
    beside: Packed | None = None,
    seed: int = 0,
) -> Iterator[OpenProbe]:
    """A warm probe in a fresh process, or in a fork where that has what a fresh one lacks; closed with all that it started.

    `memory_budget_bytes` is the most memory of the bursts' processes, None sets no limit. A start may take as long as the
    caller's `budget_s`, where that is longer than it may take anyway. Probes
    `beside` each other have memory of their data in common, and another `seed` each: they read elsewhere.

    Raises:
        WorkloadError: the dataset, model or step failed on the very first batch, or can be taken to no other process.
    """

    def started(source: Sequence[int] | Workload, start_s: float, *notes: str) -> OpenProbe:
        probe = ProcessProbe(source, memory_budget_bytes, start_s, machine.usable_cores, seed)
        exits.callback(probe.close)
        warmup = probe.start()
        known = replace(warmup, most_workers=0) if unsent else warmup
        return OpenProbe(probe=probe, warmup=known, notes=[*notes, *warmup.notes, *unsent])

    method = start_method(workload.data.multiprocessing_context)
    fault = why_not_sent(workload.data, method)
    unsent = [] if fault is None else [UNSENT.format(method=method, fault=fault)]

    with contextlib.ExitStack() as exits:
        # Where the caller was started without standard input (`<&-`) no descriptor of ours may get its number.
        while (taken := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < FIRST_OWN_FD:
            exits.callback(os.close, taken)
        os.close(taken)
        most = math.inf if _uses_device(workload) else LARGEST_PAYLOAD_BYTES  # no fork could train
        most = min(most, int((machine.memory_budget_bytes or LARGEST_PAYLOAD_BYTES) * PAYLOAD_MEMORY_SHARE))
        try:
            fds = exits.enter_context(packed(workload, Settings.read(workload), int(most), beside))
            opened = started(fds, max(START_DEADLINE_S, budget_s))
        except (NotSentError, WorkloadError) as fresh:
            reason = str(fresh).splitlines()[0].removesuffix(ENDS_TRAINING)
            is_copied = isinstance(fresh, NotSentError) and not fresh.is_too_large
            source = _with_forked_workers(workload) if is_copied else workload
            try:
                opened = started(source, FORK_DEADLINE_S, FORKED.format(reason=reason))
            except WorkloadError as fork:
                if isinstance(fresh, WorkloadError):  # with how the arguments were read
                    fails_here = fork.message == fresh.message or fork.message.endswith(ENDS_TRAINING)
                    fails_here = fails_here or fresh.message.startswith(HANGS)
                    told = fresh.message if fails_here else f"{reason} ({UNLIKE})"
                    raise WorkloadError("; ".join((told, *workload.notes)), fresh.user_traceback) from None
                told = NEITHER.format(part=part_at_fault(workload), reason=reason, fork=str(fork).splitlines()[0])
                raise WorkloadError(told, fork.user_traceback) from None
        yield opened


def _with_forked_workers(workload: Workload) -> Workload:
    """A fork has copies of what processes share, such as a `multiprocessing.Value`; only forks of it have these, too."""
    return replace(workload, data=replace(workload.data, multiprocessing_context="fork"))


def _uses_device(workload: Workload) -> bool:
    """Whether this process uses the device; then memory of it that is held for later is given back.

    Raises:
        WorkloadError: a second model does not fit beside the first.
    """
    model, device = workload.training.model, workload.training.device
    module = accelerator(device)
    if module is None or not module.is_initialized():
        return False
    module.empty_cache()
    free, _ = module.mem_get_info(device)
    parts = (*model.parameters(), *model.buffers()) if isinstance(model, torch.nn.Module) else ()
    needed = sum(each.nbytes for each in parts) + child.CONTEXT_BYTES
    if needed > free:
        raise WorkloadError(NO_ROOM.format(device=device, needed=needed / 1e9, free=free / 1e9))
    return True


class ProcessProbe:
    """A `Probe` that runs every burst in a process of its own.

    `source` is the files of the packed workload, for processes that are started fresh, or the workload itself, for forks of
    this one. A burst whose process tree grows past 90% of the memory budget is aborted. Importing torch, unpickling, the first
    batch and the warm-up must be done in `start_s`.
    """

    def __init__(
        self,
        source: Sequence[int] | Workload,
        memory_budget_bytes: int | None,
        start_s: float,
        usable_cores: int = 1,
        seed: int = 0,
    ) -> None:
        self._source, self._memory_budget_bytes, self._start_s = source, memory_budget_bytes, start_s
        self._usable_cores = usable_cores
        self._seed, self._started_s = seed, 0.0
        self._child: _Child | None = None
        self._memory: dict[LoaderConfig, MemoryUse | None] = {}
        """As it was read at the first burst of a configuration."""
        self._first_batch_s: dict[tuple[int, int | None], float] = {}
        """Of bursts whose workers started as in training, by their number and the batch size."""

    def start(self) -> WarmupReport:
        """Start the process and wait until the workload is warm; raises WorkloadError where the first batch fails."""
        message = self._start()
        if message.ready is None:
            assert message.failure is not None
            raise WorkloadError(message.failure.message, message.failure.traceback or "")
        return message.ready

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train with `config`; raises WorkloadError where a sample or the step raised, or wrote to a file of the user's."""
        outcome = self._run(Request(what="burst", plan=plan, config=config, reads_pss=config not in self._memory))
        if isinstance(outcome, Failure):  # of clones it may be one that training would not have
            is_forked = start_method(config.multiprocessing_context) == "fork"
            is_cloned = config.num_workers > 0 and not is_forked and not plan.anew
            is_cloned = is_cloned and outcome.kind != "deadline"  # no clone has a thread that it could wait for
            return self.burst(config, replace(plan, anew=True)) if is_cloned else outcome
        start = config.num_workers, config.batch_size
        if outcome.first_batch_s is not None:
            self._first_batch_s[start] = outcome.first_batch_s
        memory = self._memory.setdefault(config, outcome.memory)
        return replace(outcome, memory=memory, first_batch_s=self._first_batch_s.get(start))

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        return self._run(Request(what="step_ceiling", plan=plan))

    def hand_over(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._run(Request(what="hand_over", plan=plan, config=config, reads_pss=False))

    def close(self) -> None:
        """Kill the process and everything it started."""
        if self._child is not None:
            self._child.held.close()
            self._child = None

    def _start(self) -> Message:
        """What a new child answers: that it is warm, or why not; then there is none."""
        self.close()
        self._seed += 1
        begun = time.monotonic()
        self._child = _Child(self._source, self._seed, Allowance(self._usable_cores, self._memory_budget_bytes))
        message = self._child.ask(None, self._start_s)
        self._started_s = time.monotonic() - begun
        if message.ready is None:
            self.close()
        return message

    def _run(self, request: Request) -> Measurement | Failure:
        if self._child is None and (failure := self._start().failure) is not None:
            return failure
        child, budget_bytes, over_budget = self._child, self._memory_budget_bytes, threading.Event()
        assert child is not None

        def on_memory_limit() -> None:
            over_budget.set()
            child.kill()

        anew_s = 0.0 if request.config.num_workers else ANEW * self._started_s
        with memory_guarded(child.pid, budget_bytes, on_memory_limit):
            message = child.ask(replace(request, usable_cores=self._usable_cores), request.plan.deadline_s + anew_s)
        if over_budget.is_set():  # also where the burst was over by then: the next one needs a new process
            over = OVER_BUDGET.format(config=request.config, budget=bytes_text(budget_bytes))
            message = Message(failure=Failure(kind="memory_guard", phase="batches", message=over))
        failure = message.failure
        if over_budget.is_set() or child.is_lost or (failure is not None and needs_new_process(failure)):
            self.close()
        if failure is None:
            assert message.measurement is not None
            return message.measurement
        if message.ends_run:
            raise WorkloadError(failure.message, failure.traceback or "")
        if failure.kind == "deadline" and isinstance(self._source, Workload) and not request.config.num_workers:
            others = ", ".join(each.name for each in threading.enumerate() if each is not threading.main_thread())
            if others:
                raise WorkloadError(THREADS.format(message=failure.message, names=others))
        return failure


class _Child:
    """One process of bursts and the connection to it."""

    def __init__(self, source: Sequence[int] | Workload, seed: int, allowed: Allowance) -> None:
        with contextlib.ExitStack() as held:  # given back at once where no process can start
            ours, theirs = map(held.enter_context, socket.socketpair())
            root = scratch_root()
            self._output: IO[bytes] = held.enter_context(tempfile.TemporaryFile(dir=root))
            self._scratch = tempfile.mkdtemp(prefix="autotune-loader-", dir=root)
            held.callback(remove, self._scratch)
            link_temporary_files(self._scratch)
            self._process: subprocess.Popen[bytes] | psutil.Process
            if isinstance(source, Workload):
                pid = child.fork(source, theirs.fileno(), self._output.fileno(), self._scratch, seed, allowed)
                self._process = psutil.Process(pid)
            else:
                # A fresh interpreter with the flags of this one, which finds what this one finds.
                path = [*(each for each in sys.path if isinstance(each, str)), str(Path(__file__).resolve().parents[2])]
                fds = (theirs.fileno(), *source)
                run = RUN.format(
                    path=path, parent=os.getpid(), connection=fds[0], fds=fds[1:], seed=seed, allowed=(*allowed,)
                )
                self._process = subprocess.Popen(
                    [sys.executable, *util._args_from_interpreter_flags(), "-c", run],  # type: ignore[attr-defined]
                    pass_fds=fds,
                    env={NVML_CHECK: "1", **environment(self._scratch)},
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    start_new_session=True,  # a process group of its own, so that the whole tree can be ended
                )
            held.callback(self._process.wait)
            held.callback(self.kill)
            self.pid = self._process.pid
            held.enter_context(ended_with_us(self.pid, self._scratch))
            theirs.close()
            self._connection = Connection(ours.detach())
            held.callback(self._connection.close)
            # Workers inherit the connection, so a dead child does not close it while they live: its end is waited for, too.
            self._ends: list[Connection | int] = [self._connection]
            # Where it has ended, or the kernel is older than 5.3, the connection tells alone.
            with contextlib.suppress(OSError):
                self._ends.append(end := pidfd(self.pid))
                held.callback(os.close, end)
            self.held = held.pop_all()  # closed, it leaves no process of the group, no descriptor, no file
        self.is_lost = False

    def ask(self, request: Request | None, deadline_s: float) -> Message:
        """The answer to a request, or the first word of a new child; a failure where none comes in time or the process dies."""
        phase: FailurePhase = "start"
        begun = time.monotonic()
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the child writes on at the same offset
        try:
            if request is not None:
                send(self._connection, request)
            while heard := wait(self._ends, max(0.0, begun + deadline_s - time.monotonic())):
                # It may have answered and died in between.
                if self._connection not in heard and not self._connection.poll(0):
                    raise EOFError
                answer = receive(self._connection, Message)
                if answer.phase is None:
                    return answer
                phase = answer.phase
        except (EOFError, OSError):
            self.is_lost, code = True, None
            with contextlib.suppress(subprocess.TimeoutExpired, psutil.TimeoutExpired):
                code = self._process.wait(DEATH_S)
            return Message(failure=failure_of_death(code, phase, self._last_words()))
        self.is_lost = True
        message = f"{HANGS} {deadline_s:.0f} s, hanging in phase {phase!r}"
        message += "; a longer budget= waits for as long" if request is None else ""
        words = self._last_words() or None
        return Message(failure=Failure(kind="deadline", phase=phase, message=message, traceback=words))

    def _last_words(self) -> str:
        output, size = self._output.fileno(), os.fstat(self._output.fileno()).st_size
        return os.pread(output, LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES)).decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and its group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
