"""What every source of evidence promises, whoever observes: the same suite for each of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import Dataset

from autotune_loader.decision.evidence import Ask, Evidence, EvidenceSource
from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, SimulatedSource

CONTEXT = TwinContext(usable_cores=2, consumer_cores=1.0)
ALONE, TWO = LoaderConfig(), LoaderConfig(num_workers=2)
BROKEN = LoaderConfig(num_workers=1)
"""A configuration that every source here fails with."""


def fails(config: LoaderConfig) -> Failure | None:
    if config.key() != BROKEN:
        return None
    return Failure(kind="crashed", phase="start", message="one worker is one too few")


MACHINE = SimulatedMachine(cores=2, cpu_s=0.01, step_s=0.002, fails=fails)


class Rows(Dataset[float]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        time.sleep(0.001)
        return float(index)


def refuse(_: int) -> None:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    if info is not None and info.num_workers == 1:
        raise RuntimeError("one worker is one too few")


def simulated() -> Iterator[EvidenceSource]:
    yield SimulatedSource(MACHINE, FakeClock(), epoch_batches=32)


def bursts_of_a_simulated_machine() -> Iterator[EvidenceSource]:
    clock = FakeClock()
    probe = SimulatedProbe(MACHINE, clock, epoch_batches=32)
    yield BurstSource(probe, Space(max_workers=2), CONTEXT, [], lambda: 60.0 - clock())


def bursts_in_this_process() -> Iterator[EvidenceSource]:
    data = DataSide.from_dataset(Rows(), batch_size=4, worker_init_fn=refuse)
    probe = InlineProbe(Workload(data=data, training=TrainingSide()), inspect_machine())
    probe.start()
    begun = time.monotonic()
    yield BurstSource(probe, Space(max_workers=2), CONTEXT, [], lambda: 60.0 - (time.monotonic() - begun))
    probe.close()


@pytest.fixture(
    params=[
        simulated,
        bursts_of_a_simulated_machine,
        pytest.param(bursts_in_this_process, marks=[pytest.mark.process]),
    ],
    ids=lambda make: make.__name__,
)
def source(request: pytest.FixtureRequest) -> Iterator[EvidenceSource]:
    yield from request.param()


def test_evidence_says_what_was_asked_and_how_sure_it_is(source: EvidenceSource) -> None:
    for ask in (Ask(group=3), Ask(phase="compare", group=4), Ask(phase="compare", kind="epoch", group=5)):
        seen = source.gather(TWO, ask)
        assert (seen.config, seen.key, seen.phase, seen.kind, seen.group) == (TWO, TWO, ask.phase, ask.kind, ask.group)
        assert seen.measurement is not None
        assert math.exp(seen.log_rate) == pytest.approx(seen.measurement.samples_per_s.value)
        assert seen.own_sd > 0
        assert seen.neighbours_sd >= 0


def test_a_configuration_that_fails_is_an_answer(source: EvidenceSource) -> None:
    seen = source.gather(BROKEN, Ask())
    assert seen.failure is not None
    assert seen.log_rate == -math.inf
    assert source.gather(TWO, Ask()).failure is None


def test_without_workers_it_observes_too(source: EvidenceSource) -> None:
    assert source.gather(ALONE, Ask(phase="compare")).measurement is not None


def test_evidence_is_of_what_it_cannot_tell_apart() -> None:
    persistent = LoaderConfig(num_workers=2, persistent_workers=True)
    seen = Evidence(config=persistent, outcome=Failure(kind="crashed", phase="start", message="no"))
    assert seen.key == TWO
