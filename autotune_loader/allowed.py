"""What `allow=` opens: the values of each knob that changes training, why there may be none, and what the change means."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection

from autotune_loader.config import LoaderConfig
from autotune_loader.machine.facts import start_method
from autotune_loader.probe.workload import DataSide, Workload

# Powers of two around the user's batch size, in the order in which they are tried.
BATCH_FACTORS = (2, 4, 0.5)
# "spawn" measures as "forkserver" does, and starts more slowly.
START_METHODS = ("fork", "forkserver")


def batch_sizes(data: DataSide, allow: Collection[str]) -> tuple[int | None, ...]:
    """The user's own batch size (None), and what to try beside it; no batch is larger than an epoch."""
    own = data.batch_size
    if "batch_size" not in allow or own is None:
        return (None,)
    most = data.samples_per_epoch()
    sizes = [int(own * factor) for factor in BATCH_FACTORS]
    return (None, *(size for size in sizes if size >= 1 and size != own and (most is None or size <= most)))


def drop_lasts(data: DataSide, allow: Collection[str]) -> tuple[bool | None, ...]:
    """The user's own choice (None), and True where an epoch ends in a short batch that costs a step of its own."""
    return (None, True) if "drop_last" in allow and not _why_no_drop_last(data) else (None,)


def start_methods(workload: Workload, allow: Collection[str]) -> tuple[str | None, ...]:
    """The user's own start method (None is the interpreter's default), and the others worth a try."""
    own = workload.own_config.multiprocessing_context if workload.own_config else None
    if "multiprocessing_context" not in allow:
        return (own,)
    others = set(START_METHODS) & set(multiprocessing.get_all_start_methods()) - {own or start_method()}
    return (own, *sorted(others))


def unmet(workload: Workload, allow: Collection[str]) -> list[str]:
    """Why something that is allowed cannot be tuned here, one sentence each."""
    data, reasons = workload.data, []
    if "batch_size" in allow and len(batch_sizes(data, allow)) == 1:
        reasons.append(f"batch_size is not tuned: {_why_no_batch_size(data)}")
    if "drop_last" in allow and (why := _why_no_drop_last(data)):
        reasons.append(f"drop_last is not tuned: {why}")
    return reasons


def consequences(best: LoaderConfig, data: DataSide) -> list[str]:
    """What a chosen configuration changes in training, one sentence each."""
    said, own = [], data.batch_size
    if best.batch_size is not None and own:
        ratio = best.batch_size / own
        said.append(
            f"the batch size was tuned from {own} to {best.batch_size}: the learning rate and its schedule belong to it, so "
            f"tune them again ({ratio:g} times the learning rate is a common start for SGD, {ratio**0.5:.2g} times for Adam)"
        )
    if best.drop_last:
        said.append(f"drop_last=True leaves out the last {_left_over(data, best.batch_size)} samples of every epoch")
    if not best.in_order:
        said.append(
            "in_order=False delivers batches as they come: their order differs from run to run, even with a seed"
        )
    if best.persistent_workers and data.has_epochs:
        said.append("persistent_workers=True: set_epoch() on the dataset does not reach workers that live on")
    if best.sharing_strategy == "file_system":
        said.append(
            "sharing_strategy='file_system': call config.apply() in the job; a job that is killed leaves files in /dev/shm"
        )
    if best.multiprocessing_context == "fork":
        said.append("multiprocessing_context='fork': a dataset that uses threads or CUDA may hang in forked workers")
    return said


def _why_no_batch_size(data: DataSide) -> str:
    if data.batch_sampler is not None:
        return "a batch_sampler makes the batches; pass batch_size and sampler instead"
    if data.batch_size is None:
        return "batch_size=None leaves the batches to the dataset; a number would work"
    return f"an epoch of {data.samples_per_epoch()} samples has room for no other than {data.batch_size}"


def _why_no_drop_last(data: DataSide) -> str:
    """Why there is no last batch to drop; empty where there is one."""
    if data.batch_sampler is not None or data.batch_size is None:
        return "the batches are not made by the DataLoader"
    if data.drop_last:
        return "it is True already"
    if data.is_iterable or data.samples_per_epoch() is None:
        return "an IterableDataset's last batch shows in no burst"
    if _left_over(data, None) == 0:
        return f"every batch of an epoch is full ({data.samples_per_epoch()} samples in batches of {data.batch_size})"
    if (data.samples_per_epoch() or 0) < (data.batch_size or 1):
        return "the short batch is the only one of an epoch"
    return ""


def _left_over(data: DataSide, batch_size: int | None) -> int:
    samples, size = data.samples_per_epoch(), batch_size or data.batch_size
    return samples % size if samples and size else 0
