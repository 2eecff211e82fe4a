"""Opening a probe for a workload: in a process of its own where that works, inline where it must be, and said so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from autotune_loader.machine.facts import Machine
from autotune_loader.pipeline.workload import TrainingSide, Workload
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.payload import Payload, PayloadTooLargeError, UnpicklableError
from autotune_loader.probe.runner import START_DEADLINE_S, ProcessProbe
from autotune_loader.probe.torch_state import note_of, read_torch_state
from autotune_loader.values.plan import Isolation

# What is sent to the probe process is in memory once more. Of what is available it may take this share, and no more than takes
# some seconds to copy; a larger workload is tuned inline, where workers share it with this process.
PAYLOAD_MEMORY_SHARE = 0.3
LARGEST_PAYLOAD_BYTES = 8 << 30
REPEATED_SAMPLES = (
    "every worker of this IterableDataset delivers the same samples if it is seeded alike, so at most 1 worker is used; "
    "share them out in __iter__ by torch.utils.data.get_worker_info().id (or, where samples are drawn at random without end, "
    "make that part of the seed)"
)
OTHER_SAMPLES = (
    "{dataset}: two workers read other samples than one process does, at the same indices. Most often they share a file or "
    "database handle that was opened before they were started (open(), h5py, LMDB), and training gets wrong data without a "
    "word; open it on first use in each worker, or in worker_init_fn"
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
    start_deadline_s: float = START_DEADLINE_S,
) -> Iterator[OpenProbe]:
    """A warm probe, closed at the end with everything it started.

    Args:
        workload: what it runs.
        machine: limits of this machine.
        isolation: a process of its own, inline, or whichever works.
        memory_budget_bytes: most memory of the probe's process tree.
        start_deadline_s: a process of its own must have had its first batch and its warm-up by then.

    Raises:
        WorkloadError: the dataset, model or step failed on the very first batch.
        ValueError: `isolation="process"` was asked for, but the workload cannot travel.
    """
    with contextlib.ExitStack() as exits:
        probe, warmup, notes = _start(exits, workload, machine, isolation, memory_budget_bytes, start_deadline_s)
        if not warmup.shardable:
            notes = [*notes, REPEATED_SAMPLES]
        if not warmup.same_in_workers:
            notes = [*notes, OTHER_SAMPLES.format(dataset=type(workload.data.dataset).__qualname__)]
        notes = [*notes, *warmup.notes, *note_of(read_torch_state())]
        yield OpenProbe(probe=probe, warmup=warmup, notes=notes)


def _start(
    exits: contextlib.ExitStack,
    workload: Workload,
    machine: Machine,
    isolation: Isolation,
    memory_budget_bytes: int | None,
    start_deadline_s: float,
) -> tuple[ProcessProbe | InlineProbe, WarmupReport, list[str]]:
    """A warm probe, closed with `exits`; inline, with a note, where the workload cannot travel to a process of its own."""
    notes = model_on_device_notes(workload.training)
    if isolation != "inline":
        try:
            with contextlib.ExitStack() as attempt:
                payload = attempt.enter_context(contextlib.closing(Payload.of(workload, _largest_payload(machine))))
                process = ProcessProbe(
                    payload, machine, memory_budget_bytes=memory_budget_bytes, start_deadline_s=start_deadline_s
                )
                attempt.callback(process.close)
                warmup = process.start()
                exits.push(attempt.pop_all())
                return process, warmup, notes
        except (UnpicklableError, PayloadTooLargeError) as error:
            if isolation == "process":
                raise ValueError(f"isolation='process', but {error}; isolation='inline' would work") from error
            notes = [
                f"{error}; the bursts run inside this process instead (isolation='inline'), where not every hang can be broken"
            ]
    inline = InlineProbe(workload, machine, memory_budget_bytes=memory_budget_bytes, start_deadline_s=start_deadline_s)
    exits.callback(inline.close)
    warmup = inline.start()
    return inline, warmup, [*notes, *inline.notes]


def model_on_device_notes(training: TrainingSide) -> list[str]:
    """What a model that lies on a device already costs: tuning trains a copy, which takes as much memory there again."""
    held: dict[str, int] = {}
    if isinstance(training.model, torch.nn.Module):
        for tensor in (*training.model.parameters(), *training.model.buffers()):
            if tensor.device.type != "cpu":
                held[str(tensor.device)] = held.get(str(tensor.device), 0) + tensor.nbytes
    return [
        f"the model is on {device} already ({size / 2**20:.0f} MiB): while tuning a copy of it is there too, with "
        "gradients of its own, sent through host memory; tune() before moving it where that is too much"
        for device, size in held.items()
    ]


def _largest_payload(machine: Machine) -> int:
    available = machine.memory.available_bytes
    if available is None:
        return LARGEST_PAYLOAD_BYTES
    return min(LARGEST_PAYLOAD_BYTES, int(available * PAYLOAD_MEMORY_SHARE))
