"""A sample that raises ends the run: it is named, with its error and what to do; what raises in a worker alone does not."""

import re
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, Made, failed, measured, opened, workload

pytestmark = pytest.mark.process
ALL = BurstPlan(max_s=2.0, min_s=2.0, relative_error=1e-6, deadline_s=60.0)


def broken(bad, only_in_workers=False):
    def make(key):
        if key == bad and (get_worker_info() is not None or not only_in_workers):
            raise ValueError(f"broken image {key}\nand more of it")
        return torch.zeros(1)

    return Made(make)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)
        raise OSError("connection lost")


EXITING = Made(lambda key: torch.zeros(1) if key != 21 else sys.exit(3))
ODD = Made(lambda key: torch.zeros(2 if key == 42 else 1))


@pytest.mark.parametrize(
    ("dataset", "parts", "config", "says"),
    [
        (broken(3), {"sampler": range(64)}, ALONE, "sample 3 raises ValueError: broken image 3"),  # in the first batch
        (broken(33), {}, ONE_WORKER, "sample 33 raises ValueError: broken image 33"),
        (EXITING, {}, ALONE, "sample 21 raises SystemExit: 3"),
        (ODD, {}, ALONE, "RuntimeError: stack expects each tensor to be equal size"),
        (Stream(), {}, ALONE, "the sample after 10 of a process's stream raises OSError: connection lost"),
    ],
    ids=("first batch", "in a worker", "exit", "another shape", "stream"),
)
def test_a_sample_that_raises_is_named_with_its_error_and_what_to_do(dataset, parts, config, says):
    with pytest.raises(WorkloadError) as caught, opened(workload(dataset, **parts)) as probe:
        measured(probe.probe, config, ALL)
    assert says in caught.value.message
    to_do = "; training would end there too: mend that sample, or leave it out of the dataset"
    assert caught.value.message.endswith(to_do)
    assert "autotune_loader/" not in caught.value.user_traceback


def test_what_raises_in_workers_alone_is_their_failure():
    with opened(workload(broken(9, only_in_workers=True))) as probe:
        failure = failed(probe.probe, "user_exception", ONE_WORKER, ALL)
        assert "broken image 9, in a worker, and not when it is read again alone" in failure.message
        measured(probe.probe)


def test_no_burst_reads_what_another_one_has_cached_however_much_the_training_has_grown():
    # GIVEN samples that are slow once, and a training whose state is larger than a gigabyte
    cache, ballast = {}, []

    def remembered(key):
        if key not in cache:
            time.sleep(0.005)
            cache[key] = torch.zeros(1)
        return cache[key]

    def step(model, batch):
        ballast[:] = ballast or [torch.ones(300 << 20, dtype=torch.uint8).repeat(4)]

    plan = BurstPlan(max_s=0.2, min_s=0.1, relative_error=1e-6)
    with opened(workload(Made(remembered), training=TrainingSide(train_step=step))) as probe:
        bursts = [measured(probe.probe, plan=plan).traces[:8] for _ in range(3)]
    # THEN the samples are slow in each of them: later on a burst may come back to what it has read itself
    assert all(sum(trace.fetch_end - trace.fetch_start for trace in traces) > 8 * 0.01 for traces in bursts)


class Shuffled(IterableDataset):
    """In an order of its own, a bit changed; shared out by worker where it is asked to."""

    def __init__(self, is_sharded):
        self.is_sharded = is_sharded

    def __iter__(self):
        info = get_worker_info()
        own = np.random.default_rng(info.seed if info else 0)
        for number in own.permutation(range(info.id if self.is_sharded and info else 0, 20, 2)):
            yield torch.tensor(number + np.random.rand()) + torch.rand(())  # noqa: NPY002


class Local(list):
    def __reduce__(self):
        raise TypeError("cannot pickle Local")


@pytest.mark.parametrize(
    ("dataset", "parts", "says", "most_workers"),
    [
        (Shuffled(False), {"worker_init_fn": torch.manual_seed}, "delivers the same samples", 1),
        (Shuffled(True), {"worker_init_fn": torch.manual_seed}, "", None),
        (Made(lambda key: time.sleep(0.6) or 0), {}, "raise the budget, or tune with a smaller batch_size", None),
        (Made(float), {"collate_fn": Local}, r"cannot be pickled .*Local.* none are tried", 0),
    ],
    ids=("repeated", "sharded", "slow", "not picklable"),
)
def test_what_is_known_after_the_first_batch_is_noted(dataset, parts, says, most_workers):
    with opened(workload(dataset, **parts)) as probe:
        report = probe.warmup
    assert re.search(says, " ".join(probe.notes))
    assert report.most_workers == most_workers
    assert (report.first_fetch_s > 2.0) is ("raise the budget" in says)
