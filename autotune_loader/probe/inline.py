"""The same burst in the caller's own process: for debugging, and for workloads that cannot travel.

Here the user's objects are within reach. The dataset is used as it is: the end of a copy may be the end of what it holds. Model
and optimizer are copied, and every piece of global state that a DataLoader or a training step touches is put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils

from autotune_loader.machine.facts import Machine
from autotune_loader.machine.memory_guard import GUARDED_SHARE, MemoryGuard
from autotune_loader.machine.processes import tree, tree_pss, tree_use
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload, wrapped_datasets
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.probe.burst import running_workers
from autotune_loader.probe.copying import NotCopiedError, copied
from autotune_loader.probe.failures import StoppedError, failure_of_memory_guard
from autotune_loader.probe.leaving import BurstWorkerInit
from autotune_loader.probe.protocol import START_DEADLINE_S
from autotune_loader.probe.torch_state import read_torch_state, set_torch_state
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

log = logging.getLogger(__name__)


class InlineProbe:
    """A `Probe` that runs every burst in this process. A hang is broken where a worker of the burst hangs; in the main
    thread wherever a signal interrupts, in another one where Python code goes on; not inside of a library's own code.

    Args:
        workload: what is run; it is copied as far as that is possible.
        machine: limits of this machine.
        memory_budget_bytes: a burst is stopped once this process and its workers take 90 % of it on top of what they
            held before; None sets no limit.
        start_deadline_s: the first batch and the warm-up must be done by then.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,  # noqa: ARG002
        *,
        memory_budget_bytes: int | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self._start_deadline_s = start_deadline_s
        self._memory_budget_bytes = memory_budget_bytes
        self._held_bytes = _held_bytes() if memory_budget_bytes is not None else 0
        self._servers_before = _running_servers()
        self._user_data = workload.data
        self.notes: list[str] = []
        for_workers = replace(workload.data, worker_init_fn=BurstWorkerInit(workload.data.worker_init_fn))
        self._bench = Bench(
            data=lambda: for_workers,
            private_data=lambda: workload.data,
            training=self._copied_training(workload.training),
        )

    def start(self) -> WarmupReport:
        """Warm the workload up.

        Raises:
            WorkloadError: dataset, model or step failed on the very first batch; carries the user's own traceback.
        """
        outcome: WarmupReport | Failure | None = None
        with _Stop(self._start_deadline_s) as stop, untouched_state(self._user_data):
            outcome = self._bench.prepare(stop.enter)
        if stop.has_expired or outcome is None:
            outcome = stop.failure()
        if isinstance(outcome, Failure):
            raise WorkloadError(outcome.message, outcome.traceback or "")
        return outcome

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment with `config`.

        Raises:
            WorkloadError: too many samples of the dataset raise.
        """
        return self._run(self._bench.burst, config, plan)

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        return self._run(self._bench.step_ceiling, LoaderConfig(consumer_threads=consumer_threads), plan)

    def _run(
        self, run: Callable[..., Measurement | Failure], config: LoaderConfig, plan: BurstPlan
    ) -> Measurement | Failure:
        stop = _Stop(plan.deadline_s)
        budget = self._memory_budget_bytes
        held = int(self._held_bytes / GUARDED_SHARE)  # what this process holds anyway is no part of it
        guard = MemoryGuard(os.getpid(), None if budget is None else budget + held, stop.now)
        outcome: Measurement | Failure | None = None
        with stop, untouched_state(self._user_data), guard:
            outcome = run(config, plan, stop.enter)
        if stop.has_expired:
            return stop.failure()
        if stop.was_asked or outcome is None:
            return failure_of_memory_guard(config, self._memory_budget_bytes)
        return outcome

    def close(self) -> None:
        """End the server that the start method "forkserver" leaves running, and free the copies of model and batch.

        Workers were ended by their bursts.
        """
        self._bench.close()
        for server in _running_servers():
            # Where this is missing (it exists for Python's own tests) they end with this process.
            if server not in self._servers_before and hasattr(server, "_stop"):
                server._stop()

    def _copied_training(self, training: TrainingSide) -> TrainingSide:
        names = ("model", "optimizer", "train_step", "loss_fn")
        try:
            parts, shared = copied({name: getattr(training, name) for name in names})
        except NotCopiedError as error:
            raise WorkloadError(f"model and optimizer cannot be trained on in this process, because {error}") from error
        self.notes += [f"inline: {path} cannot be copied, so the bursts share it with you" for path in shared]
        return replace(training, **parts)


class _Stop:
    """Ends what runs in its block, in the thread that made it, from any other: when it is asked to, or at a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self.was_asked = False
        self.has_expired = False
        self._deadline_s = deadline_s
        self._phase: FailurePhase = "start"
        self._thread = threading.get_ident()
        self._timer = threading.Timer(deadline_s, self._expire)
        self._timer.daemon = True
        self._signal: int | None = None
        """Wakes the main thread where it hangs."""
        self._is_over = self._was_sent = False
        self._lock = threading.Lock()
        """Held by whoever ends the block, from without or within."""

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            self._signal = _free_signal()
            if self._signal is not None:
                signal.signal(self._signal, self._raise_stopped)
        self._timer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _traceback: object) -> bool:
        try:
            with self._lock:
                self._is_over = True
        except StoppedError:  # it was on its way
            self._is_over = True
        self._timer.cancel()
        if self._was_sent:  # an exception that was not raised yet is raised here, and does not end whatever comes next
            with contextlib.suppress(StoppedError):
                for _ in range(1000):
                    pass
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)
        return isinstance(error, StoppedError)

    def enter(self, phase: FailurePhase) -> None:
        """Called when another phase begins."""
        if not self.was_asked:
            self._phase = phase

    def now(self) -> None:
        """Kill the workers of the burst; where it has none, raise `StoppedError` in its thread."""
        with self._lock:
            if self._is_over:
                return
            self.was_asked = True
            workers = running_workers()
            for worker in workers:
                worker.kill()
            if workers:
                return
            if self._signal is not None:  # it wakes the main thread from a lock or a queue, too
                signal.pthread_kill(self._thread, self._signal)
            else:  # in another thread Python raises when its code goes on
                self._was_sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(StoppedError))

    def failure(self) -> Failure:
        """The failure of what was ended at the deadline."""
        message = f"no answer within {self._deadline_s:.0f} s, hanging in phase {self._phase!r}"
        return Failure(kind="deadline", phase=self._phase, message=message)

    def _expire(self) -> None:
        self.has_expired = True
        self.now()

    def _raise_stopped(self, _signal: int, _frame: object) -> None:
        if not self._is_over:
            raise StoppedError("stopped at the deadline, or for its memory")


def _free_signal() -> int | None:
    """A real-time signal that nobody listens to here, be it in C (`faulthandler.register`); None where all are taken.

    `SigCgt: 0000000180004002` in /proc/self/status is the mask of the signals that have a handler (proc(5)).
    """
    status = Path("/proc/self/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    free = [number for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if not caught >> (number - 1) & 1]
    return next((number for number in free if signal.getsignal(number) is signal.SIG_DFL), None)


def _held_bytes() -> int:
    """Memory of this process and its children, before anything was run."""
    members = tree(os.getpid())
    use = tree_use(members)
    return tree_pss(members) or (use.rss_bytes if use is not None else 0)


@contextlib.contextmanager
def untouched_state(data: DataSide) -> Iterator[None]:
    """Put back what loading and training change: random states, of the user's generators too, and all that is global:
    threads, modes, environment, signals, warnings.
    """
    with contextlib.ExitStack() as back, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        for put_back, *values in _state_of(data):
            back.callback(put_back, *values)
        with torch.enable_grad():
            yield


def _state_of(data: DataSide) -> Iterator[tuple[Any, ...]]:
    """What puts back the present state, with its values; the last of these first."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            yield _put_back_handler, number, signal.getsignal(number)
    if multiprocessing.get_start_method(allow_none=True) is None:  # starting workers settles the default, for good
        yield functools.partial(multiprocessing.set_start_method, force=True), None
    yield os.chdir, Path.cwd()
    yield _put_back_environment, dict(os.environ)
    yield set_torch_state, read_torch_state()
    yield torch.set_grad_enabled, torch.is_grad_enabled()
    yield torch.set_num_threads, torch.get_num_threads()
    if torch.cuda.is_initialized():
        yield torch.cuda.set_device, torch.cuda.current_device()
        yield torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()
    yield torch.set_rng_state, torch.get_rng_state()
    yield np.random.set_state, np.random.get_state()  # noqa: NPY002
    yield random.setstate, random.getstate()
    holders = [*wrapped_datasets(data.dataset), data.sampler, data.batch_sampler]
    holders += [getattr(data.batch_sampler, "sampler", None), data.collate_fn, data.worker_init_fn]
    for held in (data.generator, *(value for holder in holders for value in getattr(holder, "__dict__", {}).values())):
        if isinstance(held, random.Random):
            yield held.setstate, held.getstate()
        elif isinstance(held, np.random.Generator):
            yield setattr, held.bit_generator, "state", held.bit_generator.state
        elif isinstance(held, (torch.Generator, np.random.RandomState)):
            yield held.set_state, held.get_state()


def _put_back_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _put_back_handler(number: signal.Signals, handler: Any) -> None:
    if signal.getsignal(number) is handler:
        return
    signal.signal(number, handler)
    # Torch installs its SIGCHLD handler once and remembers that it did; it must forget, or the user's own training would notice
    # dead workers late. A missing flag does no harm.
    if number == signal.SIGCHLD and hasattr(_utils.signal_handling, "_SIGCHLD_handler_set"):
        _utils.signal_handling._SIGCHLD_handler_set = False


# Multiprocessing's own helper processes, by where their IDs are. There is no public way. The fork server goes first: it has the
# tracker's pipe open.
SERVERS = ((forkserver._forkserver, "_forkserver_pid"), (resource_tracker._resource_tracker, "_pid"))


def _running_servers() -> list[Any]:
    return [server for server, pid in SERVERS if getattr(server, pid, None) is not None]
