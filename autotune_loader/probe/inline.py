"""The same burst in the caller's own process: for debugging, and for workloads that cannot travel.

Here the user's objects are within reach, so they are protected: model and optimizer are copied, the dataset is copied where
that is possible, and every piece of global state that a DataLoader or a training step touches is put back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from autotune_loader.config import LoaderConfig
from autotune_loader.errors import WorkloadError
from autotune_loader.machine.facts import Machine
from autotune_loader.meters.memory import TreeMeter
from autotune_loader.probe.bench import Bench, Readiness
from autotune_loader.probe.copying import NotCopiedError, copied
from autotune_loader.probe.workload import DataSide, TrainingSide, Workload
from autotune_loader.trial import BurstPlan, Failure, Measurement

# A data side larger than this is not copied: bursts without workers then use it as it is.
MAX_COPY_BYTES = 256 << 20


class InlineProbe:
    """A `Probe` that runs every burst in this process, without a deadline: a hang here cannot be broken from outside."""

    def __init__(self, workload: Workload, machine: Machine, *, memory_budget_bytes: int | None = None) -> None:
        self._machine = machine
        self._memory_budget_bytes = memory_budget_bytes
        self._servers_before = _running_servers()
        self.notes: list[str] = []
        data, training = self._copied_data(workload.data), self._copied_training(workload.training)
        self._bench = Bench(data=lambda: data, private_data=lambda: self._copied_data(data), training=training)

    def start(self) -> Readiness:
        """Warm the workload up.

        Raises:
            WorkloadError: dataset, model or step failed on the very first batch; carries the user's own traceback.
        """
        with untouched_process_state():
            outcome = self._bench.prepare()
        if isinstance(outcome, Failure):
            raise WorkloadError(outcome.message, outcome.traceback or "")
        return outcome

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        meter = TreeMeter(
            os.getpid(),
            usable_cores=self._machine.usable_cores,
            memory_budget_bytes=self._memory_budget_bytes,
            on_memory_limit=lambda: None,
        )
        with untouched_process_state(), meter:
            outcome = self._bench.burst(config, plan)
        if isinstance(outcome, Failure):
            return outcome
        reading = meter.reading
        return replace(
            outcome,
            memory=reading.memory,
            cpu_share=reading.cpu_share,
            foreign_cpu_share=reading.foreign_cpu_share,
            gpu=reading.gpu,
        )

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        with untouched_process_state():
            return self._bench.step_ceiling(consumer_threads, plan)

    def close(self) -> None:
        """End the server that the start method "forkserver" leaves running; workers were ended by their bursts."""
        _stop_servers(except_for=self._servers_before)

    def _copied_data(self, data: DataSide) -> DataSide:
        """A copy of the data side; what cannot be copied is used as it is, and that is noted."""
        names = ("dataset", "sampler", "batch_sampler", "generator", "collate_fn", "worker_init_fn")
        try:
            parts, shared = copied({name: getattr(data, name) for name in names}, MAX_COPY_BYTES)
        except NotCopiedError as error:
            self._note(f"inline: the dataset is used as it is, {error}; bursts without workers may fill its caches")
            return data
        for path in shared:
            self._note(f"inline: {path} cannot be copied, so the bursts share it with you")
        return replace(data, **parts)

    def _copied_training(self, training: TrainingSide) -> TrainingSide:
        names = ("model", "optimizer", "train_step", "loss_fn")
        try:
            parts, shared = copied({name: getattr(training, name) for name in names})
        except NotCopiedError as error:
            raise WorkloadError(f"model and optimizer cannot be trained on in this process, because {error}") from error
        for path in shared:
            self._note(f"inline: {path} cannot be copied, so the bursts share it with you")
        return replace(training, **parts)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


@contextlib.contextmanager
def untouched_process_state() -> Iterator[None]:
    """Put back what loading and training change globally: random states, threads, modes, environment, signals, warnings."""
    import numpy as np
    import torch

    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    sharing = torch.multiprocessing.get_sharing_strategy()
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "enabled")}
    environment, handlers, folder = dict(os.environ), _signal_handlers(), Path.cwd()
    start_method = multiprocessing.get_start_method(allow_none=True)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.multiprocessing.set_sharing_strategy(sharing)
        for name, value in cudnn.items():
            setattr(torch.backends.cudnn, name, value)
        _restore_environment(environment)
        os.chdir(folder)
        if start_method is None:  # starting workers settles the default, after which the user could not set it
            multiprocessing.set_start_method(None, force=True)
        _restore_signal_handlers(handlers)


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _signal_handlers() -> dict[signal.Signals, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)}


def _restore_signal_handlers(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
            if number == signal.SIGCHLD:
                _let_torch_install_its_handler_again()


def _let_torch_install_its_handler_again() -> None:
    # torch installs its SIGCHLD handler once per process and remembers that it did; having taken it out again we must
    # make it forget, or the user's own training would notice dead workers late. A missing flag does no harm.
    from torch.utils.data import _utils

    if hasattr(_utils.signal_handling, "_SIGCHLD_handler_set"):
        _utils.signal_handling._SIGCHLD_handler_set = False


def _running_servers() -> frozenset[str]:
    """Which of multiprocessing's own helper processes run: the fork server and the resource tracker."""
    running = {
        "forkserver": getattr(forkserver._forkserver, "_forkserver_pid", None),
        "resource_tracker": getattr(resource_tracker._resource_tracker, "_pid", None),
    }
    return frozenset(name for name, pid in running.items() if pid is not None)


def _stop_servers(except_for: frozenset[str]) -> None:
    # There is no public way. Where these methods are missing (they exist for Python's own tests) the helpers end with
    # this process. The fork server goes first: it has the tracker's pipe open.
    for name, server in (
        ("forkserver", forkserver._forkserver),
        ("resource_tracker", resource_tracker._resource_tracker),
    ):
        if name in _running_servers() - except_for and hasattr(server, "_stop"):
            server._stop()
