"""What `allow=` changes in training, and why something that is allowed cannot be tuned, in sentences."""

from __future__ import annotations

from collections.abc import Collection

from autotune_loader.decision.space import Space
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.config import LoaderConfig


def unmet(data: DataSide, allow: Collection[str], space: Space) -> list[str]:
    """Why something that is allowed cannot be tuned here, one sentence each."""
    reasons = []
    if "batch_size" in allow and len(space.batch_sizes) == 1:
        reasons.append(f"batch_size is not tuned: {_why_no_batch_size(data)}")
    if "drop_last" in allow and (why := why_no_drop_last(data)):
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
    if best.drop_last and _left_over(data, best.batch_size):
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


def why_no_drop_last(data: DataSide) -> str:
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
