"""A burst and its step: on a device that works behind the host, by its own time; and on the CPU."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import FakeLane, FakeStep, FakeTimeline, made_here, made_in_time
from torch.utils.data import TensorDataset

from autotune_loader.pipeline.prefetch import prefetched
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bench import warm_up
from autotune_loader.probe.burst import Cached, run_burst, run_epochs
from autotune_loader.probe.burst_loop import Run
from autotune_loader.probe.device import Timeline, timeline_of
from autotune_loader.probe.failures import is_device_broken
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.twin import Twin
from autotune_loader.twin.observation import Observation
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock
from tests.support.bursts import ALONE, ONE_WORKER, QUICK, measured, warm_bench

PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01)
HOST_S = 0.001


def run_of(
    *, fetch_s: float, step_s: float, copy_s: float = 0.0, ahead: int = 0, host_s: float = HOST_S, workers: int = 1
) -> tuple[Measurement, FakeTimeline]:
    """A run on a device that works behind the host, on a clock that moves only when told to."""
    clock = FakeClock()
    timeline = FakeTimeline(clock, clock.sleep, copy_s)
    step: Any = FakeStep(timeline, step_s=step_s, copy_s=0.0 if ahead else copy_s, host_s=host_s)
    lane = FakeLane(timeline) if ahead else None
    timeline.open()
    run = Run(PLAN, workers, clock(), timeline=timeline, lane=lane)
    batches: Iterator[Any] = (made_in_time if workers else made_here)(clock, fetch_s)
    batches = batches if lane is None else prefetched(batches, lane, ahead)
    run.deliver(batches, step)
    while not run.knows_enough():
        run.deliver(batches, step)
    return run.measurement(), timeline


@pytest.mark.parametrize(
    ("times", "period_s", "step_s", "wait_share"),
    [
        # a host that runs ahead of a busy device shows no waiting: only the copy keeps the device from its step
        ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.002}, 0.012, 0.010, 2 / 12),
        # a slow loader shows as waiting of the device
        ({"fetch_s": 0.040, "step_s": 0.010}, 0.040, 0.010, 0.75),
        # a step that takes the host longer than the device takes the host's time
        ({"fetch_s": 0.001, "step_s": 0.002, "host_s": 0.010}, 0.010, 0.010, 0.0),
        # copies ahead of the step are hidden behind it, and those that take longer bind
        ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.006, "ahead": 1}, 0.010, 0.010, 0.0),
        ({"fetch_s": 0.002, "step_s": 0.010, "copy_s": 0.006, "ahead": 2}, 0.010, 0.010, 0.0),
        ({"fetch_s": 0.002, "step_s": 0.005, "copy_s": 0.020, "ahead": 2}, 0.020, 0.005, 0.75),
        # a step may be longer than the window
        ({"fetch_s": 0.001, "step_s": 10.0}, 10.0, 10.0, 0.0),
    ],
)
def test_a_run_on_a_device_has_the_devices_times(
    times: dict[str, Any], period_s: float, step_s: float, wait_share: float
) -> None:
    found, timeline = run_of(**times)
    assert found.samples_per_s.value == pytest.approx(4 / period_s, rel=0.02)
    assert found.step_s == pytest.approx(step_s, rel=0.01)
    assert found.wait_share == pytest.approx(wait_share, abs=0.03)
    # what a copy takes is known also where it is hidden; it is no work, nor is waiting
    assert found.gpu.copy_s == pytest.approx(times.get("copy_s", 0.0))
    assert found.gpu.busy_share == pytest.approx(step_s / period_s, abs=0.03)
    # the device is waited for at the edges of the window only
    assert [event for event in timeline.events if event != "lane"] == ["open", "synchronize"]


def test_the_twin_expects_of_pinning_and_of_copying_ahead_what_they_bring() -> None:
    # GIVEN copies of 12 ms, 3 ms from pinned memory, and a step of 10 ms
    pageable, _ = run_of(fetch_s=0.002, step_s=0.010, copy_s=0.012)
    pinned, _ = run_of(fetch_s=0.002, step_s=0.010, copy_s=0.003)
    configs = [replace(ONE_WORKER, pin_memory=pin, device_prefetch=ahead) for pin in (False, True) for ahead in (0, 2)]

    def periods_ms(*seen: tuple[LoaderConfig, Measurement]) -> list[float]:
        observations = [Observation.from_measurement(config, found) for config, found in seen]
        twin = Twin.fit(observations, cores=16, step_s_by_threads={None: 0.010})
        return [4e3 / prediction.samples_per_s.value for prediction in twin.predict_all(configs)]

    # THEN of a pageable burst it knows what copying ahead hides, and expects that pinning is worth a try
    assert periods_ms((ONE_WORKER, pageable)) == pytest.approx([22, 12, 16, 10], rel=0.1)
    # THEN of a pinned burst it knows the rest
    both = periods_ms((ONE_WORKER, pageable), (replace(ONE_WORKER, pin_memory=True), pinned))
    assert both == pytest.approx([22, 12, 13, 10], rel=0.1)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("fetch_s", "step_s"), [(0.002, 0.010), (0.010, 0.004)])
def test_what_the_main_process_fetches_while_the_device_steps_costs_nothing(
    fetch_s: float, step_s: float, ahead: int
) -> None:
    # GIVEN no workers: the loop's own process fetches, and the device steps meanwhile
    found, _ = run_of(fetch_s=fetch_s, step_s=step_s, host_s=0.0001, workers=0, ahead=ahead)
    # THEN the slower of the two sets the rate, and the twin predicts that
    period_s = max(fetch_s + 0.0001, step_s)
    assert found.samples_per_s.value == pytest.approx(4 / period_s, rel=0.02)
    config = LoaderConfig(device_prefetch=ahead)
    twin = Twin.fit([Observation.from_measurement(config, found)], cores=4, step_s_by_threads={None: step_s})
    assert twin.predict_all([config])[0].samples_per_s.value == pytest.approx(4 / period_s, rel=0.1)
    # THEN every history is in order
    for trace in found.traces:
        assert trace.requested <= trace.fetch_start <= trace.collate_end <= trace.received <= trace.step_end


class Epochs:
    """Holds the batches of one epoch after another: eight of four samples, made in no time."""

    iterator: Any = None
    num_workers = 1

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def open(self, loader: Any) -> None:
        self.iterator = itertools.islice(made_in_time(self.clock, 0.001), 8)


def test_whole_epochs_end_when_the_device_has_done_them_and_not_when_the_host_has() -> None:
    # GIVEN steps of 50 ms, handed over in 1 ms: 80 samples/s, of which the host sees the launches of up to 16 ahead
    clock = FakeClock()
    timeline = FakeTimeline(clock, clock.sleep)
    step: Any = FakeStep(timeline, step_s=0.050, host_s=HOST_S)
    holder: Any = Epochs(clock)
    holder.open(holder)
    timeline.open()
    run = Run(PLAN, 1, clock(), timeline=timeline)
    # WHEN whole epochs are measured
    run.deliver(holder.iterator, step)
    found = run.measurement(*run_epochs(holder, holder, run, step, replace(PLAN, max_s=0.8)))
    # THEN the rate is the device's, and so is the share of the window in which it worked
    assert found.samples_per_s.value == pytest.approx(80, rel=1e-3)
    assert found.gpu.busy_share == pytest.approx(1.0)
    assert found.window_s == pytest.approx(found.samples / 80)


def test_a_host_is_held_before_it_is_seconds_ahead() -> None:
    # GIVEN a device that takes 100 ms for what costs the host next to nothing, on a window of a second
    found, timeline = run_of(fetch_s=1e-4, step_s=0.1, host_s=1e-4)
    # THEN little more is left to wait for than the window was long
    assert timeline.busy_until < 1.0 + 2.0
    assert found.samples_per_s.value == pytest.approx(40, rel=1e-3)


@pytest.mark.process
def test_a_device_without_events_is_timed_by_the_host_and_says_so() -> None:
    for device, count in (("meta", 1), ("cpu", 0)):
        _, report = warm_bench(rows(), device=device, train_step=lambda model, batch: None)
        assert sum("timed by the host's clock" in note for note in report.notes) == count
        assert timeline_of(torch.device(device)) is None
    assert isinstance(timeline_of(torch.device("xpu:0")), Timeline)  # other accelerators have events


@pytest.mark.process
def test_after_a_burst_that_gave_memory_back_the_next_is_not_slower() -> None:
    # GIVEN a device on which the first step takes 0.3 s longer once memory was given back
    timeline: Any = FakeTimeline(malloc_s=0.3)
    bench, _ = warm_bench(rows(), train_step=lambda model, batch: timeline.launch(0.002))
    bench._timeline = timeline
    timeline.is_cold = True
    # WHEN a burst of other batches, which took more, is followed by two
    outcomes = [measured(bench, config) for config in (LoaderConfig(batch_size=8), ALONE, ALONE)]
    # THEN only that one gave its memory back, and no window has the driver's time in it
    assert timeline.events.count("release") == 1
    assert max(trace.step_s for found in outcomes for trace in found.traces) < 0.15


def rows() -> DataSide:
    return DataSide.from_dataset(TensorDataset(torch.arange(64.0)), batch_size=4)


def step_of(train: Any, device: str = "cpu") -> TrainingStep:
    return TrainingStep(train, "a step", torch.device(device))


@pytest.mark.process
def test_a_burst_measures_on_the_device_and_keeps_its_memory_for_the_next() -> None:
    # GIVEN a device that takes 5 ms for a step and tells its peak
    timeline: Any = FakeTimeline()

    def train(batch: Any) -> None:
        timeline.launch(0.005)
        timeline.peak = max(timeline.peak, 123)

    # WHEN a burst runs with a worker and copies ahead
    found = run_burst(rows(), step_of(train), LoaderConfig(num_workers=1, device_prefetch=2), QUICK, timeline=timeline)
    # THEN
    assert isinstance(found, Measurement)
    assert found.step_s == pytest.approx(0.005, rel=0.3)
    assert found.gpu.memory_bytes == 123
    assert timeline.events == ["open", "lane", "synchronize"]


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


@pytest.mark.parametrize(
    ("data", "train", "config"),
    [
        (rows(), out_of_memory, ALONE),
        (rows(), lambda batch: None, LoaderConfig(device_prefetch=1)),
        (Cached(torch.ones(4), 4), out_of_memory, ALONE),
    ],
    ids=["step", "copy ahead", "ceiling"],
)
def test_what_runs_out_of_device_memory_is_a_failure_of_its_own_kind_and_gives_it_back(
    data: Any, train: Any, config: LoaderConfig
) -> None:
    timeline: Any = FakeTimeline()
    lane = FakeLane(timeline)
    lane.send = out_of_memory
    timeline.make_lane = lambda: lane
    failure = run_burst(data, step_of(train), config, QUICK, timeline=timeline)
    assert isinstance(failure, Failure)
    assert failure.kind == "device_memory"
    assert "smaller batch" in failure.message
    assert timeline.events[-1] == "release"
    # the next burst is measured
    assert isinstance(run_burst(rows(), step_of(lambda batch: None), ALONE, QUICK, timeline=timeline), Measurement)


def test_ctrl_c_releases_the_devices_memory_too() -> None:
    timeline: Any = FakeTimeline()

    def interrupted(batch: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_burst(rows(), step_of(interrupted), ALONE, QUICK, timeline=timeline)
    assert timeline.events == ["open", "release"]


def test_the_ceilings_batch_lies_on_the_device_beforehand() -> None:
    timeline: Any = FakeTimeline()
    seen: list[torch.Tensor] = []

    def train(batch: torch.Tensor) -> None:
        seen.append(batch)
        timeline.launch(0.002)

    # WHEN the ceiling is measured on a device other than the host's
    run_burst(Cached(torch.ones(4), 4), step_of(train, "meta"), ALONE, QUICK, timeline=timeline)
    # THEN every step had the very same tensor: it was copied once, outside the window
    assert {id(batch) for batch in seen} == {id(seen[0])}
    assert seen[0].device.type == "meta"


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        ([5.0, 0.5, 0.2, 0.01, 0.01, 0.01], 5),  # compiled, compiled again, a graph recorded, settled
        ([0.2, 0.01, 0.01], 3),  # cuDNN chose its algorithms
        ([2.0, 2.0, 2.0], 2),  # slow by nature: waiting longer tells nothing
        ([30.0, 0.01, 0.01], 3),  # the first, however long, says nothing of the next
        ([0.1 * 2**-i for i in range(20)], 10),  # never settles
    ],
)
def test_the_step_is_warmed_up_until_it_has_settled(seconds: list[float], steps: int) -> None:
    clock = FakeClock()
    timeline: Any = FakeTimeline(clock, clock.sleep)
    ran: list[Any] = []

    def train(batch: Any) -> None:
        timeline.launch(seconds[len(ran)])
        ran.append(batch)

    warm_up(step_of(train), torch.ones(1), timeline)
    assert len(ran) == steps


def test_an_optimizer_with_a_state_follows_its_model_to_the_device() -> None:
    # GIVEN a model that lies on a device, and its optimizer, whose state came from the host
    model = torch.nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model.weight] = {name: torch.zeros(1, 2) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[model.weight]["step"] = torch.tensor(3.0)
    # WHEN the step is built for that device
    build_step(TrainingSide(model=model, optimizer=optimizer, device="meta"), torch.ones(1, 2))
    # THEN the momenta are there; the step count, which torch keeps on the host, is not
    (state, *_) = optimizer.state.values()
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")


@pytest.mark.process
def test_a_closed_bench_holds_neither_model_nor_batch() -> None:
    def bench_of_a_model() -> tuple[Any, Any]:
        model = torch.nn.Linear(1, 1)
        bench, _ = warm_bench(rows(), model=model, train_step=lambda model, batch: model(batch[0][:, None]).sum())
        return bench, weakref.ref(model)

    bench, watched = bench_of_a_model()
    bench.close()
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(("since_s", "share"), [(3.0, 0.5), (1.0, None)])
def test_nvml_is_asked_for_the_window_alone(
    monkeypatch: pytest.MonkeyPatch, since_s: float, share: float | None
) -> None:
    # GIVEN NVML's samples of the last seconds, in half of which a kernel ran; all of the time before the first is unknown
    monkeypatch.setattr("autotune_loader.probe.device.use_of_current_device", lambda: [(since_s, 1.0), (0.0, 0.5)])
    timeline = Timeline(torch.device("cuda"), torch.cuda)
    monkeypatch.setattr(timeline, "now", lambda: 10.0)
    # THEN a window of three seconds has that half, if most of the window is known
    assert timeline.util(7.0, 10.0) == share


def test_a_failed_kernel_breaks_the_process_and_full_memory_does_not() -> None:
    failure = functools.partial(Failure, kind="user_exception", phase="step")
    broken = failure(message="RuntimeError: CUDA error: device-side assert triggered")
    full = failure(message="OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert [is_device_broken(each) for each in (broken, full, None)] == [True, False, False]
