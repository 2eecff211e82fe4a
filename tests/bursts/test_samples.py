"""A sample that raises ends the run: it is named, with its error and what to do; what raises in a worker alone does not."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune_loader.bursts.bench import workers_repeat_each_other
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, failed, measured, opened, workload

pytestmark = pytest.mark.process
ALL = BurstPlan(max_s=2.0, min_s=2.0, relative_error=1e-6, deadline_s=60.0)


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, ..., of which some raise, or do so in workers alone, and some have another shape."""

    def __init__(self, bad: Any = (), bad_in_workers: Any = (), odd: Any = (), nap_s: float = 0.0) -> None:
        self.bad, self.bad_in_workers, self.odd, self.nap_s = bad, bad_in_workers, odd, nap_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, key: int) -> torch.Tensor:
        time.sleep(self.nap_s)
        if key in self.bad or (get_worker_info() is not None and key in self.bad_in_workers):
            raise ValueError(f"broken image {key}\nand more of it")
        return torch.full((2 if key in self.odd else 1,), float(key))


class Exiting(Numbers):
    def __getitem__(self, key: int) -> torch.Tensor:
        return super().__getitem__(key) if key != 21 else sys.exit(3)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        yield from torch.arange(10.0)
        raise OSError("connection lost")


@pytest.mark.parametrize(
    ("dataset", "parts", "says"),
    [
        (Numbers(bad=(3,)), {"sampler": range(64)}, "sample 3 raises ValueError: broken image 3"),  # in the first batch
        (Exiting(), {}, "sample 21 raises SystemExit: 3"),
        (Numbers(odd=(42,)), {}, "RuntimeError: stack expects each tensor to be equal size"),
        (Stream(), {}, "the sample after 10 of a process's stream raises OSError: connection lost"),
    ],
)
def test_a_sample_that_raises_is_named_with_its_error_and_what_to_do(dataset: Any, parts: Any, says: str) -> None:
    with pytest.raises(WorkloadError) as caught, opened(workload(dataset, **parts)) as probe:
        measured(probe.probe, ALONE, ALL)
    assert says in caught.value.message
    assert caught.value.message.endswith(
        "; training would end there too: mend that sample, or leave it out of the dataset"
    )
    assert "autotune_loader/" not in caught.value.user_traceback


def test_workers_are_blamed_only_for_what_raises_in_them_alone() -> None:
    says = pytest.raises(WorkloadError, match="sample 33 raises ValueError")
    with opened(workload(Numbers(bad=(33,)))) as probe, says:
        measured(probe.probe, ONE_WORKER, ALL)
    with opened(workload(Numbers(bad_in_workers=(9,)))) as probe:
        failure = failed(probe.probe, "user_exception", ONE_WORKER, ALL)
        assert "broken image 9, in a worker, and not when it is read again alone" in failure.message
        measured(probe.probe)


class Remembering(Numbers):
    """Each sample is slow once."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, key: int) -> torch.Tensor:
        if key not in self.cache:
            time.sleep(0.005)
            self.cache[key] = torch.zeros(1)
        return self.cache[key]


def test_no_burst_reads_what_another_one_has_cached_however_much_the_training_has_grown() -> None:
    # GIVEN a training whose state is larger than a gigabyte
    ballast: list[torch.Tensor] = []

    def step(model: Any, batch: Any) -> None:
        if not ballast:
            ballast.append(torch.ones(300 << 20, dtype=torch.uint8).repeat(4))

    plan = BurstPlan(max_s=0.2, min_s=0.1, relative_error=1e-6)
    with opened(workload(Remembering(), training=TrainingSide(train_step=step))) as probe:
        bursts = [measured(probe.probe, plan=plan).traces[:8] for _ in range(3)]
    # THEN the samples are slow in each of them: later on a burst may come back to what it has read itself
    assert all(sum(trace.fetch_end - trace.fetch_start for trace in traces) > 8 * 0.01 for traces in bursts)


class Shuffled(IterableDataset[torch.Tensor]):
    """In an order of its own, a bit changed; shared out by worker where it is asked to."""

    def __init__(self, is_sharded: bool) -> None:
        self.is_sharded = is_sharded

    def __iter__(self) -> Any:
        info = get_worker_info()
        own = np.random.default_rng(info.seed if info else 0)
        for number in own.permutation(range(info.id if self.is_sharded and info else 0, 20, 2)):
            yield torch.tensor(number + np.random.rand()) + torch.rand(())  # noqa: NPY002


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_stream_that_shuffles_and_augments_is_no_less_repeated(is_sharded: bool) -> None:
    data = DataSide(dataset=Shuffled(is_sharded), batch_size=4, worker_init_fn=torch.manual_seed)
    assert workers_repeat_each_other(data, 0.01) is not is_sharded


class Local(list[Any]):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle Local")


@pytest.mark.parametrize(
    ("dataset", "parts", "says"),
    [
        (Shuffled(False), {}, "delivers the same samples"),
        (Numbers(nap_s=0.6), {}, "raise the budget, or tune with a smaller batch_size"),
        (Numbers(), {"collate_fn": Local}, r"cannot be pickled .*Local.* none are tried"),
    ],
)
def test_what_is_known_after_the_first_batch_is_noted(dataset: Any, parts: Any, says: str) -> None:
    with opened(workload(dataset, **parts)) as probe:
        report = probe.warmup
    assert re.search(says, " ".join(probe.notes))
    assert report.most_workers == (1 if isinstance(dataset, Shuffled) else 0 if parts else None)
    assert (report.first_fetch_s > 2.0) is (getattr(dataset, "nap_s", 0) > 0)
