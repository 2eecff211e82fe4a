"""Opening a probe for a workload: in a process of its own where that works, inline where it must be, and said so."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from autotune_loader.machine.facts import Machine
from autotune_loader.pipeline.inherited import MANAGER
from autotune_loader.pipeline.look import look, shown
from autotune_loader.pipeline.workload import TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.payload import NotSentError, Payload
from autotune_loader.probe.protocol import START_DEADLINE_S
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.probe.torch_state import note_of, read_torch_state
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.plan import Isolation

# What is sent to the probe process is in memory once more. Of what is available it may take this share, and no more than takes
# some seconds to copy; a larger workload is tuned inline, where workers share it with this process.
PAYLOAD_MEMORY_SHARE, LARGEST_PAYLOAD_BYTES = 0.3, 8 << 30
# Large models take minutes, and a search among kernels more. A step that hangs is then found out late.
COMPILE_DEADLINE_S = 900.0
# A fork that hangs on a lock or a thread of this process does so at once.
FORK_DEADLINE_S = 15.0
FORKED = (
    "{reason}; the bursts run in forks of this process instead, where a step on the CPU has one intra-op thread, and caches "
    "that bursts fill stay filled"
)
NOT_FORKED = (
    "{reason}; nor can the bursts run in a fork of this process ({fork}), so they run inside this process, on your own "
    "objects: the dataset may have cached or counted, and not every hang can be broken (isolation='inline')"
)
STEP_BOUND = (
    "{reason}, and {path} is {words}, which works in the process that made it only, so the step can run in no other; a "
    "train_step that does without it would work, as would train_step=0.05, the seconds of a step"
)
MANAGED = "{path} is {words}, of which there is no copy: what bursts write there stays"
REPEATED_SAMPLES = (
    "every worker of this IterableDataset delivers the same samples if it is seeded alike, so at most 1 worker is used; "
    "share them out in __iter__ by torch.utils.data.get_worker_info().id (or, where samples are drawn at random without end, "
    "make that part of the seed)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProbe:
    """A warm probe and what is known of the workload."""

    probe: ProcessProbe | InlineProbe
    warmup: WarmupReport
    notes: list[str] = field(default_factory=list)
    """What the user should know about how it runs."""


@contextlib.contextmanager
def open_probe(
    workload: Workload,
    machine: Machine,
    isolation: Isolation,
    memory_budget_bytes: int | None,
    *,
    budget_s: float = 0.0,
) -> Iterator[OpenProbe]:
    """A warm probe, closed at the end with everything it started.

    Args:
        workload: what it runs.
        machine: limits of this machine.
        isolation: a process of its own, inline, or whichever works.
        memory_budget_bytes: most memory of the probe's process tree.
        budget_s: of the caller; a start may take as long, where that is longer than it may take anyway.

    Raises:
        WorkloadError: the dataset, model or step failed on the very first batch.
        ValueError: the workload cannot travel, and `isolation="process"` was asked for, or its step would hang in a fork.
    """
    start_deadline_s = max(COMPILE_DEADLINE_S if compiles(workload.training) else START_DEADLINE_S, budget_s)
    limits: _Limits = {"memory_budget_bytes": memory_budget_bytes, "start_deadline_s": start_deadline_s}
    with contextlib.ExitStack() as exits:
        opened: _Opened | str = ""
        notes: list[str] = []
        if isolation != "inline":
            opened = unsent = _sent(exits, workload, machine, limits)
            if isinstance(unsent, str):
                _check_step(workload.training, unsent)
                opened = fork = _forked(exits, workload, machine, limits)
                if isinstance(fork, str) and isolation == "process":
                    raise ValueError(
                        f"isolation='process', but {unsent}, and in a fork: {fork}; isolation='inline' would work"
                    )
                note = NOT_FORKED if isinstance(fork, str) else FORKED
                notes.append(note.format(reason=unsent, fork=fork))
                notes += _managed(workload)
        probe, warmup = _opened(exits, InlineProbe(workload, machine, **limits)) if isinstance(opened, str) else opened
        notes += probe.notes
        notes += [] if warmup.shardable else [REPEATED_SAMPLES]
        notes += [*warmup.notes, *note_of(read_torch_state())]
        yield OpenProbe(probe=probe, warmup=warmup, notes=notes)


_Opened: TypeAlias = "tuple[ProcessProbe | InlineProbe, WarmupReport]"
_Limits: TypeAlias = "dict[str, Any]"


def _opened(exits: contextlib.ExitStack, probe: ProcessProbe | InlineProbe) -> _Opened:
    """The probe, warm; it is closed with `exits`, or where it does not become warm."""
    with contextlib.ExitStack() as attempt:
        attempt.callback(probe.close)
        warmup = probe.start()
        exits.push(attempt.pop_all())
    return probe, warmup


def _sent(exits: contextlib.ExitStack, workload: Workload, machine: Machine, limits: _Limits) -> _Opened | str:
    """A probe in a process of its own, or why the workload cannot travel there."""
    try:
        payload = exits.enter_context(contextlib.closing(Payload.of(workload, _largest_payload(machine))))
        return _opened(exits, ProcessProbe(payload, machine, **limits))
    except NotSentError as error:
        return str(error)


def _forked(exits: contextlib.ExitStack, workload: Workload, machine: Machine, limits: _Limits) -> _Opened | str:
    """A probe in a fork of this process, or why it cannot run there."""
    limits = {**limits, "start_deadline_s": min(limits["start_deadline_s"], FORK_DEADLINE_S)}
    try:
        return not_for_a_fork(workload) or _opened(exits, ProcessProbe(workload, machine, **limits))
    except (NotSentError, WorkloadError) as error:
        return str(error).splitlines()[0]


def _check_step(training: TrainingSide, unsent: str) -> None:
    """Refuse a step that waits, in a fork, for a thread or process that is not there, as a logger's.

    Raises:
        ValueError: it does.
    """
    for path, words in look({"train_step": training.train_step}).bound[:1]:
        raise ValueError(STEP_BOUND.format(reason=unsent, path=shown(path), words=words))


def _managed(workload: Workload) -> list[str]:
    """What a dataset has in another process, which bursts change in a fork, too."""
    found = look({"dataset": workload.data.dataset}).handles
    return [MANAGED.format(path=shown(path), words=words) for path, words in found if words == MANAGER]


def compiles(training: TrainingSide) -> bool:
    """Whether torch.compile is part of the step, as far as that shows: its first run may take minutes."""
    step = training.train_step
    parts = list(training.model.modules()) if isinstance(training.model, torch.nn.Module) else []
    with contextlib.suppress(ValueError):  # a name that is not bound yet
        reached = inspect.getclosurevars(step) if inspect.isfunction(step) else None
        parts += [*reached.nonlocals.values(), *reached.globals.values()] if reached is not None else []
    return bool(training.compiled) or any(map(_is_compiled, (*parts, step, training.loss_fn)))


def _is_compiled(value: Any) -> bool:
    own = getattr(value, "__dict__", {})
    is_wrapper = type(value).__name__ == "OptimizedModule" or "_torchdynamo_orig_callable" in own
    return is_wrapper or own.get("_compiled_call_impl") is not None


def not_for_a_fork(workload: Workload) -> str | None:
    """Why a workload cannot run in a fork of this process, as far as that is known beforehand."""
    if torch.cuda.is_initialized():
        return "this process uses CUDA, which no fork of it can"
    bound = look({"dataset": workload.data.dataset}).bound
    return f"{shown(bound[0][0])} is {bound[0][1]}, which works in this process only" if bound else None


def _largest_payload(machine: Machine) -> int:
    available = machine.memory.available_bytes
    if available is None:
        return LARGEST_PAYLOAD_BYTES
    return min(LARGEST_PAYLOAD_BYTES, int(available * PAYLOAD_MEMORY_SHARE))
