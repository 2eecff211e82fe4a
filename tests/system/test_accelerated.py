"""The doors on the simulated accelerator, in real processes: the device's times, and what binds.

Steps, copies and fetches take what a test says; what comes of them is known (`torch.sim`, see
tests/support/accelerator). A busy machine makes the host late, and a device never fast: so times
are medians, at least what the device needs, and well below what a wait in the wrong place makes.
What is exact about them is in tests/bursts/test_loop.py, on a test's clock.
"""

import inspect
import os
import time
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch.utils.data import DataLoader, dataloader, default_collate

from autotune_loader import DevicePrefetcher, compare, tune
from autotune_loader.bursts import parent
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import BurstPlan, LoaderConfig, WorkloadError
from tests.support.accelerator import built_nvml
from tests.support.bursts import Made, assert_views_travel_once, measured, opened, workload

PINS_FOR_ANY = "accelerator" in inspect.getsource(dataloader)
pytestmark = [
    pytest.mark.xdist_group("simulated"),
    pytest.mark.system,
    pytest.mark.skipif(not PINS_FOR_ANY, reason="torch's DataLoader pins for CUDA alone"),
]

BATCH, BYTES = 4, 400_000
PAGEABLE, PINNED = (LoaderConfig(num_workers=1, pin_memory=pinned) for pinned in (False, True))
DEEP = LoaderConfig(num_workers=1, prefetch_factor=12, pin_memory=True)
AHEAD = LoaderConfig(num_workers=1, pin_memory=True, device_prefetch=1)
PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01, deadline_s=30.0)


def assert_takes(seconds, known_s):
    assert 0.97 * known_s <= seconds
    assert seconds <= 1.25 * known_s


class Sleep:
    """Takes so many seconds; what a busy machine adds to one call, the next ones make up for."""

    def __init__(self, seconds, most_late_s):
        self.seconds, self.most_late_s, self.due = seconds, most_late_s, 0.0

    def __call__(self):
        self.due = max(self.due, time.monotonic() - self.most_late_s) + self.seconds
        time.sleep(max(0.0, self.due - time.monotonic()))


class Model(torch.nn.Module):
    """Gives a loss; its device takes `step_s` for it, and its host `host_s`."""

    def __init__(self, step_s, host_s):
        super().__init__()
        self.step_s, self.host = step_s, Sleep(host_s, 0.005)
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.host()
        torch.sim.work(self.step_s, x)
        return (self.weight * x[0, 0]).sum()


def job(fetch_s=0.0005, step_s=0.01, copy_s=0.001, host_s=0.0, pinning_s=0.0, own=False):
    """Data, model and step: a step of its own moves its batch, and waits for the copy."""
    torch.sim.configure(bytes_per_s=BYTES / copy_s, pinning_s=pinning_s)
    fetch = Sleep(fetch_s, 0.03)

    def make(index):
        fetch()
        return {"x": torch.zeros(BYTES // BATCH // 4)}

    def step(model, batch):
        return model(batch["x"].to("sim"))

    return Made(make, 4096), Model(step_s, host_s), step if own else None


def without_neighbours():
    """Have the diagnosis take this machine for a quiet one; tests/diagnosis judges others."""
    of = Evidence.of.__func__
    Evidence.of = classmethod(
        lambda cls, burst, **more: of(cls, replace(burst, foreign_cpu_share=0.0), **more)
    )


def tuned(options, **times):
    without_neighbours()
    data, model, step = job(**times)
    options = {"batch_size": BATCH, "device": "sim", "budget": 3, "progress": False, **options}
    result = tune(data, model, train_step=step, **options)
    assert not torch.sim.is_initialized()  # the caller's process has not opened it
    return result


STEP_BOUND = {"step_s": 0.030}
LOADER_BOUND = {"fetch_s": 0.030, "step_s": 0.020, "own": True}
COPY_BOUND = {"copy_s": 0.030, "step_s": 0.010}
AHEAD_TOO = {"allow": "device_prefetch"}


@pytest.mark.parametrize(
    ("times", "options", "kind", "period_s"),
    [
        (STEP_BOUND, {}, "step", 0.031),
        (LOADER_BOUND, {"max_workers": 1}, "storage", 0.120),
        ({**COPY_BOUND, "own": True}, AHEAD_TOO, "copy", 0.030),
    ],
)
def test_tune_finds_what_binds(simulated, times, options, kind, period_s):
    result = simulated.call(tuned, options, **times)
    assert result.bottleneck.kind == kind
    assert_takes(BATCH / result.rate.value, period_s)
    assert_takes(BATCH / result.ceiling.value, times["step_s"])
    # pageable copies take twice as long, and the host waits for them
    assert result.best.pin_memory or kind == "storage"
    assert (result.best.device_prefetch > 0) == (options is AHEAD_TOO)
    assert result.measurement_of(result.best).gpu_memory_bytes >= BYTES
    assert result.machine.gpu == "Simulated accelerator"


def bursts(configs, **times):
    data, model, step = job(**times)
    side = TrainingSide(model=model, train_step=step, device="sim")
    with opened(workload(data, BATCH, side)) as probe:
        return [measured(probe.probe, config, PLAN) for config in configs]


@pytest.mark.parametrize(
    ("times", "of_configs"),  # seconds of a batch, of its step, of its copy, share of waiting
    [
        # the host goes on while the device works: a wait for each step would make it their sum
        ({"step_s": 0.030, "host_s": 0.020}, {PINNED: (0.031, 0.030, 0.001, 1 / 31)}),
        # a copy lies before its step, pageable it takes twice as long; ahead it lies beside steps
        (
            {"copy_s": 0.030, "step_s": 0.040},
            {
                PAGEABLE: (0.100, 0.040, 0.060, 0.6),
                PINNED: (0.070, 0.040, 0.030, 3 / 7),
                AHEAD: (0.040, 0.040, 0.0, 0),
            },
        ),
        # a step that moves its batch and waits for it has its copy in it
        ({"copy_s": 0.030, "step_s": 0.040, "own": True}, {PINNED: (0.070, 0.070, 0.030, 0)}),
        # memory that is pinned for the first time is no part of the rate
        ({"step_s": 0.040, "pinning_s": 0.1}, {DEEP: (0.041, 0.040, 0.001, 1 / 41)}),
    ],
)  # fmt: skip
def test_a_burst_has_the_devices_times(simulated, times, of_configs):
    found = simulated.call(bursts, list(of_configs), **times)
    for burst, (period_s, step_s, copy_s, wait_share) in zip(
        found, of_configs.values(), strict=True
    ):
        ends = [trace.step_end for trace in burst.traces]
        assert_takes(median(map(float.__sub__, ends[1:], ends)), period_s)
        assert_takes(median(trace.step_s for trace in burst.traces), step_s)
        assert burst.copy_s == pytest.approx(copy_s, abs=0.01)
        assert burst.wait_share == pytest.approx(wait_share, abs=0.15)


class SlowToPin(dict):
    """Takes 20 ms for it."""

    def pin_memory(self):
        time.sleep(0.02)
        return SlowToPin({name: value.pin_memory() for name, value in self.items()})


def stamped(configs):
    """Bursts of a worker that takes 80 ms for a batch, a thread that pins, and a step of 10 ms."""
    data, model, step = job(fetch_s=0.02, own=True)
    side = TrainingSide(model=model, train_step=step, device="sim")
    slow = workload(data, BATCH, side, collate_fn=lambda rows: SlowToPin(default_collate(rows)))
    with opened(slow) as probe:
        return [measured(probe.probe, config, PLAN) for config in configs]


def test_the_thread_that_pins_leaves_its_times(simulated):
    alone = LoaderConfig(pin_memory=True)
    pinned, ahead, pageable, by_the_loop = simulated.call(stamped, (PINNED, AHEAD, PAGEABLE, alone))
    for burst in (pinned, ahead):
        assert burst.pin_s == pytest.approx(0.02, abs=0.01)
        for each in burst.traces:
            assert each.collate_end <= each.pin_start <= each.pin_end <= each.received
    # THEN waiting for workers or for the thread is not taken for receiving
    assert 5 * pinned.receive_s < median(each.wait_s for each in pinned.traces)
    for burst in (pageable, by_the_loop):
        assert burst.pin_s is None
        assert all(each.pin_end is None for each in burst.traces)


def handed_over(config):
    data, model, _ = job(fetch_s=0.1, copy_s=0.02, step_s=0.01)
    steps = []

    def step(model, batch):  # its batches are alike, and once it is warm all pinned or none
        steps.append(1)
        assert not batch["x"].any()
        assert len(steps) <= 10 or batch["x"].is_pinned() == config.pin_memory
        return model(batch["x"].to("sim", non_blocking=True))

    side = TrainingSide(model=model, train_step=step, device="sim")
    with opened(workload(data, BATCH, side)) as probe:
        return probe.probe.hand_over(config, PLAN)


@pytest.mark.parametrize(("config", "copy_s"), [(PINNED, 0.02), (PAGEABLE, 0.04)])
def test_handing_over_is_its_copies_without_the_dataset(simulated, config, copy_s):
    found = simulated.call(handed_over, config)
    assert_takes(BATCH / found.samples_per_s.value, copy_s + 0.01)
    assert found.copy_s == pytest.approx(copy_s, abs=0.01)
    assert (found.pin_s is not None) == config.pin_memory


UUID = "aaaaaaaa-1111-2222"


def told_by_nvml(environ):
    os.environ.update(environ)
    return tuned({"max_workers": 1})


def test_tune_tells_what_nvml_tells(simulated, tmp_path):
    # GIVEN a device that is 64% busy with all that runs there
    environ = {
        "SIMULATED_NVML": f"{built_nvml(tmp_path)} {UUID}",
        "NVML_STANDIN": f"GPU-{UUID} 50000 0 0 0 {3 << 30} 1000:64",
    }
    result = simulated.call(told_by_nvml, environ)
    assert result.gpu_utilization == pytest.approx(0.64)
    assert result.measurement_of(result.best).gpu_utilization == result.gpu_utilization
    assert {*result.to_dataframe().gpu_used_bytes.dropna()} == {3 << 30}
    assert "GPU 64% busy (NVML)." in result.report()


def compared():
    data, model, _ = job(**COPY_BOUND)
    configs = {"pageable": PAGEABLE, "pinned": PINNED}
    sides = {name: DataLoader(data, BATCH, **each.to_kwargs()) for name, each in configs.items()}
    return compare(sides, model, device="sim", budget=30, progress=False)


def test_compare_tells_what_pinning_brings(simulated):
    found = simulated.call(compared)
    assert found.ratios["pinned"].value == pytest.approx(70 / 40, rel=0.2)
    assert [side.bottleneck.kind for side in found.sides] == ["copy", "copy"]


def prefetched(copy_s, step_s, depth):
    """Seconds of a batch, what was read of each, and what CUDA would have read or written early."""
    torch.sim.configure(bytes_per_s=BYTES / copy_s)
    made = [torch.full((BYTES // 4,), float(each)).pin_memory() for each in range(8)]
    means, marks = [], []
    for batch in DevicePrefetcher(made, "sim", depth):
        torch.sim.work(step_s, batch)
        means.append(batch.mean())
        marks.append(torch.sim.current_stream().record_event(torch.sim.Event(enable_timing=True)))
    torch.sim.synchronize()
    return marks[0].elapsed_time(marks[-1]) / 7e3, torch.stack(means).tolist(), torch.sim.hazards()


@pytest.mark.parametrize(
    ("copy_s", "step_s", "depth"),
    [(0.015, 0.030, 1), pytest.param(0.030, 0.015, 3, marks=pytest.mark.smoke)],
)
def test_batches_copied_ahead_are_whole(simulated, copy_s, step_s, depth):
    period_s, values, hazards = simulated.call(prefetched, copy_s, step_s, depth)
    assert values == [float(each) for each in range(8)]
    assert hazards == []
    assert_takes(period_s, 0.030)  # the longer of copy and step


def test_views_of_one_storage_travel_once(simulated):
    simulated.call(assert_views_travel_once, "sim")


def said(data, model, step=None):
    data = data if isinstance(data, DataLoader) else DataLoader(data, BATCH)
    try:
        result = tune(data, model, train_step=step, device="sim", budget=2, progress=False)
    except WorkloadError as error:
        return str(error)
    return "\n".join([*result.summary, *map(str, result.warnings)])


def kernel_fails_in_a_warm_step():
    data, model, _ = job()

    def step(model, batch):
        model.steps = getattr(model, "steps", 0) + 1
        if model.steps > 30:
            torch.sim.fail()
        return model(batch["x"].to("sim"))

    return said(data, model, step)


def in_use_where_only_forks_do():
    data, _, _ = job()
    layer = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    return said(data, layer.to("sim"))


def in_use_with_large_data():
    """More than is copied as long as a fork would do: here none would."""
    parent.LARGEST_PAYLOAD_BYTES = 1 << 20
    data = torch.utils.data.TensorDataset(torch.zeros(4096, 256))
    model = torch.nn.Linear(256, 1).to("sim")

    def step(model, batch):
        return model(batch[0].to("sim")).mean()

    side = TrainingSide(model=model, train_step=step, device="sim")
    with opened(workload(data, BATCH, side)) as probe:
        return f"in forks: {[note for note in probe.notes if 'forks' in note]}"


class Length:
    """Its `to` goes to other units."""

    def to(self, unit):
        raise ValueError(f"no such unit: {unit}")


def only_the_step_can_move_the_batch():
    data, model, step = job(own=True)

    def collate(rows):
        return {"x": rows[0]["x"][None], "length": Length()}

    return said(DataLoader(data, BATCH, collate_fn=collate), model, step)


def no_room_for_a_second_model():
    torch.sim.configure(memory_bytes=600 << 20)
    return said([torch.zeros(1 << 14)] * 64, torch.nn.Linear(1 << 14, 1 << 12).to("sim"))


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (kernel_fails_in_a_warm_step, "device-side assert triggered"),
        (in_use_where_only_forks_do, "uses sim, which no fork of it can; train_step=0.05"),
        (in_use_with_large_data, "in forks: []"),
        (only_the_step_can_move_the_batch, " samples/s"),
        (no_room_for_a_second_model, "takes at least 0.8 GB, and 0.4 GB are free: move it"),
    ],
)  # fmt: skip
def test_trouble_with_the_device_is_a_sentence(simulated, trouble, says):
    assert says in simulated.call(trouble)
