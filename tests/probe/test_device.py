from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeLane, FakeStep, FakeTimeline, made_here, made_in_time
from torch.utils.data import TensorDataset

from autotune_loader.pipeline.prefetch import prefetched
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.bench import Bench, WarmupReport, warm_up
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

PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01)
QUICK = BurstPlan(max_s=0.2, min_s=0.05, relative_error=0.2)
HOST_S = 0.001


def measured(
    *,
    fetch_s: float,
    step_s: float,
    copy_s: float = 0.0,
    ahead: int = 0,
    host_s: float = HOST_S,
    workers: int = 1,
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
    found, _ = measured(**times)
    assert found.samples_per_s.value == pytest.approx(4 / period_s, rel=0.02)
    assert found.step_s == pytest.approx(step_s, rel=0.01)
    assert found.wait_share == pytest.approx(wait_share, abs=0.03)
    # what a copy takes is known also where it is hidden
    assert found.gpu.copy_s == pytest.approx(times.get("copy_s", 0.0))


def test_the_twin_learns_the_copy_that_was_hidden() -> None:
    found, _ = measured(fetch_s=0.002, step_s=0.010, copy_s=0.006, ahead=2)
    seen = Observation.from_measurement(LoaderConfig(num_workers=1, device_prefetch=2), found)
    assert (float(seen.receive_s.mean()), float(seen.step_s.mean())) == (pytest.approx(0.006), pytest.approx(0.010))


def test_the_twin_expects_of_pinning_and_of_copying_ahead_what_they_bring() -> None:
    # GIVEN copies of 12 ms, 3 ms from pinned memory, and a step of 10 ms
    pageable, _ = measured(fetch_s=0.002, step_s=0.010, copy_s=0.012)
    pinned, _ = measured(fetch_s=0.002, step_s=0.010, copy_s=0.003)
    loop = LoaderConfig(num_workers=1)
    configs = [replace(loop, pin_memory=pin, device_prefetch=ahead) for pin in (False, True) for ahead in (0, 2)]

    def periods_ms(*seen: tuple[LoaderConfig, Measurement]) -> list[float]:
        observations = [Observation.from_measurement(config, found) for config, found in seen]
        twin = Twin.fit(observations, cores=16, step_s_by_threads={None: 0.010})
        return [4e3 / prediction.samples_per_s.value for prediction in twin.predict_all(configs)]

    # THEN of a pageable burst it knows what copying ahead hides, and expects that pinning is worth a try
    assert periods_ms((loop, pageable)) == pytest.approx([22, 12, 16, 10], rel=0.1)
    # THEN of a pinned burst it knows the rest
    both = periods_ms((loop, pageable), (replace(loop, pin_memory=True), pinned))
    assert both == pytest.approx([22, 12, 13, 10], rel=0.1)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("fetch_s", "step_s"), [(0.002, 0.010), (0.010, 0.004)])
def test_what_the_main_process_fetches_while_the_device_steps_costs_nothing(
    fetch_s: float, step_s: float, ahead: int
) -> None:
    # GIVEN no workers: the loop's own process fetches, and the device steps meanwhile
    found, _ = measured(fetch_s=fetch_s, step_s=step_s, host_s=0.0001, workers=0, ahead=ahead)
    # THEN the slower of the two sets the rate, and the twin predicts that
    period_s = max(fetch_s + 0.0001, step_s)
    assert found.samples_per_s.value == pytest.approx(4 / period_s, rel=0.02)
    config = LoaderConfig(device_prefetch=ahead)
    twin = Twin.fit([Observation.from_measurement(config, found)], cores=4, step_s_by_threads={None: step_s})
    assert twin.predict_all([config])[0].samples_per_s.value == pytest.approx(4 / period_s, rel=0.1)
    # THEN every history is in order
    for trace in found.traces:
        assert trace.requested <= trace.fetch_start <= trace.collate_end <= trace.received <= trace.step_end


@pytest.mark.parametrize(("fetch_s", "share"), [(0.002, 10 / 12), (0.040, 0.25)])
def test_the_share_of_time_in_which_the_device_worked_is_known_to_the_step(fetch_s: float, share: float) -> None:
    # GIVEN steps of 10 ms, behind copies of 2 ms or behind a slow loader WHEN measured THEN copies and waits are no work
    found, _ = measured(fetch_s=fetch_s, step_s=0.010, copy_s=0.002 if fetch_s < 0.01 else 0.0)
    assert found.gpu.busy_share == pytest.approx(share, rel=0.01)


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
    holder = Epochs(clock)
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


@pytest.mark.process
def test_a_device_without_events_is_timed_by_the_host_and_says_so() -> None:
    # GIVEN a device whose time torch cannot tell WHEN a bench is warm THEN there is a note, and none for a CPU
    step = functools.partial(TrainingSide, train_step=lambda model, batch: None)
    notes = []
    for device in ("meta", "cpu"):
        warmup = Bench(rows, rows, step(device=device)).prepare()
        assert isinstance(warmup, WarmupReport)
        notes.append([note for note in warmup.notes if "timed by the host's clock" in note])
    assert [len(found) for found in notes] == [1, 0]
    assert notes[0][0].startswith("meta has no events")


class FakeEvent:
    """An event of a kind of device that does at once what it is given."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at - self.at) * 1e3


def test_other_accelerators_are_timed_by_their_events_and_may_lack_the_rest() -> None:
    # GIVEN a torch for XPU, and one of a kind that has events and little else, as MPS does
    little = SimpleNamespace(Event=FakeEvent, synchronize=lambda: None, empty_cache=lambda: None)
    assert isinstance(timeline_of(torch.device("xpu:0")), Timeline)
    timeline = Timeline(torch.device("mps:0"), little)
    # WHEN the latter times a burst
    timeline.open()
    begun = timeline.now()
    mark = timeline.mark()
    timeline.synchronize()
    # THEN its marks are on the host's clock, and what it cannot tell is None
    passed = timeline.passed(mark)
    assert passed is not None
    assert begun - 0.01 < passed < timeline.now() + 0.01
    assert timeline.peak_bytes() is None
    timeline.release()
    assert timeline.is_cold


@pytest.mark.process
def test_after_a_burst_that_gave_memory_back_the_next_is_not_slower() -> None:
    # GIVEN a device on which the first step takes 0.3 s longer once memory was given back
    timeline = FakeTimeline(malloc_s=0.3)

    def train(model: Any, batch: Any) -> None:
        timeline.launch(0.002)

    bench = Bench(rows, rows, TrainingSide(train_step=train))
    assert isinstance(bench.prepare(), WarmupReport)
    bench._timeline = timeline
    timeline.is_cold = True
    # WHEN a burst of other batches, which took more, is followed by two
    outcomes = [bench.burst(config, QUICK) for config in (LoaderConfig(batch_size=8), LoaderConfig(), LoaderConfig())]
    # THEN only that one gave its memory back, and no window has the driver's time in it
    assert timeline.events.count("release") == 1
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        assert max(trace.step_s for trace in outcome.traces) < 0.15


def test_the_device_is_waited_for_at_the_edges_of_the_window_only() -> None:
    _, timeline = measured(fetch_s=0.002, step_s=0.010)
    assert timeline.events == ["open", "synchronize"]


def test_a_host_is_held_before_it_is_seconds_ahead() -> None:
    # GIVEN a device that takes 100 ms for what costs the host next to nothing, on a window of a second
    found, timeline = measured(fetch_s=1e-4, step_s=0.1, host_s=1e-4)
    # THEN little more is left to wait for than the window was long
    assert timeline.busy_until < 1.0 + 2.0
    assert found.samples_per_s.value == pytest.approx(40, rel=1e-3)


def rows() -> DataSide:
    return DataSide.from_dataset(TensorDataset(torch.arange(64.0)), batch_size=4)


def step_of(train: Any) -> TrainingStep:
    return TrainingStep(train, "a step", torch.device("cpu"))


@pytest.mark.process
def test_a_burst_measures_on_the_device_and_keeps_its_memory_for_the_next() -> None:
    # GIVEN a device that takes 5 ms for a step and tells its peak
    timeline = FakeTimeline()

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


def test_without_tuned_prefetch_no_lane_is_opened() -> None:
    timeline = FakeTimeline()
    run_burst(rows(), step_of(lambda batch: timeline.launch(0.001)), LoaderConfig(), QUICK, timeline=timeline)
    assert "lane" not in timeline.events


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


@pytest.mark.process
def test_a_step_that_runs_out_of_device_memory_is_a_failure_of_its_own_kind_and_the_next_burst_works() -> None:
    # GIVEN a step that runs out of memory on its third batch
    timeline, steps = FakeTimeline(), iter([None, None, out_of_memory])

    def train(batch: Any) -> None:
        timeline.launch(0.001)
        trouble = next(steps, None)
        if trouble:
            trouble()

    # WHEN two bursts run
    first = run_burst(rows(), step_of(train), LoaderConfig(num_workers=1), QUICK, timeline=timeline)
    second = run_burst(rows(), step_of(train), LoaderConfig(num_workers=1), QUICK, timeline=timeline)
    # THEN the first says what to do, its memory was released, and the second is measured
    assert isinstance(first, Failure)
    assert (first.kind, first.phase) == ("device_memory", "step")
    assert "smaller batch" in first.message
    assert timeline.events[:3] == ["open", "release", "open"]
    assert isinstance(second, Measurement)


def test_a_copy_ahead_that_runs_out_of_device_memory_is_one_too() -> None:
    timeline = FakeTimeline()
    lane = FakeLane(timeline)
    lane.send = out_of_memory  # type: ignore[method-assign]
    timeline.make_lane = lambda: lane  # type: ignore[method-assign]
    failure = run_burst(rows(), step_of(lambda batch: None), LoaderConfig(device_prefetch=1), QUICK, timeline=timeline)
    assert isinstance(failure, Failure)
    assert failure.kind == "device_memory"
    assert timeline.events[-1] == "release"


def test_ctrl_c_releases_the_devices_memory_too() -> None:
    timeline = FakeTimeline()

    def interrupted(batch: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_burst(rows(), step_of(interrupted), LoaderConfig(), QUICK, timeline=timeline)
    assert timeline.events == ["open", "release"]


def test_the_ceilings_batch_lies_on_the_device_beforehand() -> None:
    # GIVEN a device other than the host's
    timeline, seen = FakeTimeline(), []

    def train(batch: torch.Tensor) -> None:
        seen.append(batch)
        timeline.launch(0.002)

    step = TrainingStep(train, "a step", torch.device("meta"))
    # WHEN the ceiling is measured
    found = run_burst(Cached(torch.ones(4), 4), step, LoaderConfig(), QUICK, timeline=timeline)
    # THEN every step had the very same tensor: it was copied once, outside the window
    assert isinstance(found, Measurement)
    assert {id(batch) for batch in seen} == {id(seen[0])}
    assert seen[0].device.type == "meta"


def test_a_ceiling_that_does_not_fit_the_device_is_a_failure_and_releases() -> None:
    timeline = FakeTimeline()
    failure = run_burst(Cached(torch.ones(4), 4), step_of(out_of_memory), LoaderConfig(), QUICK, timeline=timeline)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.phase, timeline.events[-1]) == ("device_memory", "step", "release")


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
    # GIVEN steps that take so long, in turn
    clock = FakeClock()
    timeline, ran = FakeTimeline(clock, clock.sleep), []

    def train(batch: Any) -> None:
        timeline.launch(seconds[len(ran)])
        ran.append(batch)

    # WHEN warmed up THEN that many were run
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
    # GIVEN a warm bench
    import gc
    import weakref

    model = torch.nn.Linear(1, 1)
    watched = weakref.ref(model)
    sides = [TrainingSide(model=model, train_step=lambda model, batch: model(batch[0][:, None]).sum())]
    bench = Bench(rows, rows, sides.pop())
    assert isinstance(bench.prepare(), WarmupReport)
    # WHEN it is closed and the caller's own model is gone
    bench.close()
    del model
    gc.collect()
    # THEN nothing keeps a copy alive
    assert watched() is None


@pytest.mark.parametrize(("since_s", "share"), [(3.0, 0.5), (1.0, None)])
def test_nvml_is_asked_for_the_window_alone(
    monkeypatch: pytest.MonkeyPatch, since_s: float, share: float | None
) -> None:
    # GIVEN NVML's samples of the last seconds, in half of which a kernel ran; all of the time before the first is unknown
    monkeypatch.setattr("autotune_loader.probe.device.use_of_current_device", lambda: [(since_s, 1.0), (0.0, 0.5)])
    timeline = Timeline(torch.device("cuda"), torch.cuda)
    monkeypatch.setattr(timeline, "now", lambda: 10.0)
    # WHEN a window of three seconds is asked for THEN it is that half, if most of the window is known
    assert timeline.util(7.0, 10.0) == share


def test_a_failed_kernel_breaks_the_process_and_full_memory_does_not() -> None:
    broken = Failure(
        kind="user_exception", phase="step", message="RuntimeError: CUDA error: device-side assert triggered"
    )
    full = Failure(
        kind="device_memory", phase="step", message="OutOfMemoryError: CUDA out of memory. Tried to allocate"
    )
    assert [is_device_broken(each) for each in (broken, full, None)] == [True, False, False]


@pytest.mark.process
def test_a_step_on_the_cpu_has_no_timeline_and_no_gpu_and_says_so() -> None:
    bench = Bench(rows, rows, TrainingSide())
    warmup = bench.prepare()
    assert isinstance(warmup, WarmupReport)
    assert timeline_of(torch.device("cpu")) is None
