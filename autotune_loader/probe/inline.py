"""The same burst in the caller's own process: for debugging, and for workloads that cannot travel.

Here the user's objects are within reach, so they are protected: model and optimizer are copied, the dataset is copied where
that is possible, and every piece of global state that a DataLoader or a training step touches is put back.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autotune_loader.config import LoaderConfig
from autotune_loader.errors import WorkloadError
from autotune_loader.machine.facts import Machine
from autotune_loader.meters.memory import TreeMeter
from autotune_loader.probe.bench import Bench, Readiness
from autotune_loader.probe.workload import DataSide, TrainingSide, Workload
from autotune_loader.trial import BurstPlan, Failure, Measurement


class InlineProbe:
    """A `Probe` that runs every burst in this process, without a deadline: a hang here cannot be broken from outside."""

    def __init__(self, workload: Workload, machine: Machine, *, memory_budget_bytes: int | None = None) -> None:
        self._machine = machine
        self._memory_budget_bytes = memory_budget_bytes
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
        """Nothing to end: every burst has ended its own workers."""

    def _copied_data(self, data: DataSide) -> DataSide:
        """A copy of the data side; what cannot be copied is used as it is, and that is noted."""
        sampler_like = {name: self._copied(name, getattr(data, name)) for name in ("sampler", "batch_sampler")}
        return replace(
            data,
            dataset=self._copied("dataset", data.dataset),
            generator=_copied_generator(data.generator),
            **sampler_like,
        )

    def _copied_training(self, training: TrainingSide) -> TrainingSide:
        # In one deepcopy, so that the optimizer's parameters are the copied model's.
        model, optimizer = self._copied("model and optimizer", (training.model, training.optimizer))
        return replace(training, model=model, optimizer=optimizer)

    def _copied(self, name: str, value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception as error:
            note = f"inline: {name} cannot be copied ({error}); bursts without workers use it as it is"
            if note not in self.notes:
                self.notes.append(note)
            return value


def _copied_generator(generator: Any) -> Any:
    if generator is None:
        return None
    import torch

    twin = torch.Generator(device=generator.device)
    twin.set_state(generator.get_state())
    return twin


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
    environment, handlers = dict(os.environ), _signal_handlers()
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
