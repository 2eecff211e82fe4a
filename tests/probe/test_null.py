"""Bursts for which nothing is fetched: what is left is the batch's own way from the worker to the loop."""

from __future__ import annotations

import pytest
import torch

from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bench import Bench
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]
PLAN = BurstPlan(max_s=0.4, min_s=0.2, relative_error=0.1, null_dataset=True)


class Slow(torch.utils.data.Dataset):
    """Samples that nobody wants to wait for again."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": torch.full((1000,), float(index)), "name": f"s{index}"}


def collate(samples):
    assert "x" in samples[0], "the user's collate function sees the user's samples only"
    return [torch.stack([sample["x"] for sample in samples]), [sample["name"] for sample in samples]]


@pytest.fixture
def bench():
    data = DataSide.from_dataset(Slow(), batch_size=4, collate_fn=collate)
    bench = Bench(data=lambda: data, private_data=lambda: data, training=TrainingSide)
    bench.prepare()
    yield bench
    bench.close()


def test_copies_of_one_batch_travel_and_tell_what_transport_costs(bench):
    # GIVEN a batch of 4 samples, 16 kB, as any collate function may have made it
    measured = bench.burst(LoaderConfig(num_workers=2, prefetch_factor=4), PLAN)
    assert isinstance(measured, Measurement)
    # THEN the same bytes come in batches of the same size, and most were ready when the loop asked
    assert (measured.batch_bytes, measured.batch_size) == (16_000, 4)
    ready = [trace for trace in measured.traces[1:] if trace.collate_end <= trace.requested]
    assert len(ready) > len(measured.traces) / 2
    assert all(trace.receive_s > 0 for trace in ready)


def test_without_workers_nothing_is_transported(bench):
    measured = bench.burst(LoaderConfig(), PLAN)
    assert isinstance(measured, Measurement)
    assert {trace.worker for trace in measured.traces} == {-1}
