"""The doors on the simulated accelerator, in real processes: the device's own times come out, and what binds is named.

Steps, copies and fetches take what a test says; what comes of them is known (`torch.sim`, tests/support/accelerator).
"""

import inspect
import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, dataloader

from autotune_loader import DevicePrefetcher, compare, tune
from autotune_loader.bursts import parent
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import BurstPlan, LoaderConfig, WorkloadError
from tests.support.accelerator import built_nvml
from tests.support.bursts import Made, assert_views_travel_once, measured, opened, workload

PINS_FOR_ANY = "accelerator" in inspect.getsource(dataloader)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not PINS_FOR_ANY, reason="needs a torch whose DataLoader pins for other devices than CUDA"
    ),
]

BATCH, BYTES = 4, 400_000
PAGEABLE, PINNED = (LoaderConfig(num_workers=1, pin_memory=pinned) for pinned in (False, True))
DEEP = LoaderConfig(num_workers=1, prefetch_factor=12, pin_memory=True)
AHEAD = LoaderConfig(num_workers=1, pin_memory=True, device_prefetch=1)
PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01, deadline_s=30.0)


class Sleep:
    """Takes so many seconds; what a busy machine adds to one call, up to `most_late_s`, the next ones make up for."""

    def __init__(self, seconds, most_late_s):
        self.seconds, self.most_late_s, self.due = seconds, most_late_s, 0.0

    def __call__(self):
        self.due = max(self.due, time.monotonic() - self.most_late_s) + self.seconds
        time.sleep(max(0.0, self.due - time.monotonic()))


class Model(torch.nn.Module):
    """Gives a loss, as a model of transformers does; its device takes `step_s` for it, and its host `host_s`."""

    def __init__(self, step_s, host_s):
        super().__init__()
        self.step_s, self.host, self.weight = (
            step_s,
            Sleep(host_s, 0.005),
            torch.nn.Parameter(torch.ones(1)),
        )

    def forward(self, x):
        self.host()
        torch.sim.work(self.step_s, x)
        return (self.weight * x[0, 0]).sum()


def job(
    fetch_s=0.0005, step_s=0.01, copy_s=0.001, host_s=0.0, own=False, blocking=False, pinning_s=0.0
):
    """Data, model and step: a step of its own moves its batch."""
    torch.sim.configure(bytes_per_s=BYTES / copy_s, pinning_s=pinning_s)
    fetch = Sleep(fetch_s, 0.03)

    def make(index):
        fetch()
        return {"x": torch.zeros(BYTES // BATCH // 4)}

    def step(model, batch):
        return model(batch["x"].to("sim", non_blocking=not blocking))

    return Made(make, 4096), Model(step_s, host_s), step if own else None


def tuned(options, **times):
    data, model, step = job(**times)
    result = tune(
        data,
        model,
        train_step=step,
        batch_size=BATCH,
        device="sim",
        budget=3,
        progress=False,
        **options,
    )
    assert result.measurement_of(result.best).gpu_memory_bytes >= BYTES
    assert result.machine.gpu == "Simulated accelerator"
    assert not torch.sim.is_initialized()  # the caller's process has not opened it
    busy = (
        result.bottleneck.kind == "unclear" and "Other processes used" in result.bottleneck.sentence
    )
    return (
        busy or result.bottleneck.kind,
        BATCH / result.rate.value,
        BATCH / result.ceiling.value,
        result.best,
    )


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
def test_tune_finds_what_binds_by_construction_and_the_devices_periods(
    simulated, times, options, kind, period_s
):
    found, period, ceiling, best = simulated.call(tuned, options, **times)
    assert found in (
        kind,
        True,
    )  # with that many neighbours it is not clear what a fetch waits for, and told so
    assert period == pytest.approx(period_s, rel=0.05)
    assert ceiling == pytest.approx(times["step_s"], rel=0.05)
    assert (
        best.pin_memory or kind == "storage"
    )  # pageable copies take twice as long, and the host waits
    assert (best.device_prefetch > 0) == (options is AHEAD_TOO)


def bursts(configs, **times):
    """Of each configuration: seconds of a batch, of its step and of what its copy adds, and the share of waiting."""
    data, model, step = job(**times)
    side = TrainingSide(model=model, train_step=step, device="sim")
    with opened(workload(data, BATCH, side)) as probe:
        found = [measured(probe.probe, config, PLAN) for config in configs]
    return [
        (BATCH / each.samples_per_s.value, each.step_s, each.copy_s, each.wait_share)
        for each in found
    ]


@pytest.mark.parametrize(
    ("times", "of_configs"),
    [
        # the host goes on while the device works: a wait for each step would make it their sum
        ({"step_s": 0.030, "host_s": 0.020}, {PINNED: (0.031, 0.030, 0.001, 1 / 31)}),
        ({"step_s": 0.010, "host_s": 0.060}, {PINNED: (0.060, 0.060, 0.001, 1 / 60)}),
        # a copy lies before its step, and from pageable memory takes twice as long; ahead it lies beside the step before
        (
            {"copy_s": 0.030, "step_s": 0.040},
            {PAGEABLE: (0.100, 0.040, 0.060, 0.6), PINNED: (0.070, 0.040, 0.030, 3 / 7), AHEAD: (0.040, 0.040, 0.0, 0)},
        ),
        # one that moves its batch has its copy in its step
        (
            {"copy_s": 0.030, "step_s": 0.040, "own": True},
            {PAGEABLE: (0.100, 0.100, 0.060, 0), PINNED: (0.070, 0.070, 0.030, 0), AHEAD: (0.040, 0.040, 0.0, 0)},
        ),
        # and one that waits for its copy waits for nothing that its step would not have waited for
        ({"copy_s": 0.030, "step_s": 0.040, "own": True, "blocking": True}, {PINNED: (0.070, 0.070, 0.030, 0)}),
        # memory that is pinned for the first time is no part of the rate
        ({"step_s": 0.040, "pinning_s": 0.1}, {PINNED: (0.041, 0.040, 0.001, 1 / 41), DEEP: (0.041, 0.040, 0.001, 1 / 41)}),
    ],
)  # fmt: skip
def test_a_burst_has_the_devices_times(simulated, times, of_configs):
    found = simulated.call(bursts, list(of_configs), **times)
    for (period_s, step_s, copy_s, wait), known in zip(found, of_configs.values(), strict=True):
        assert (period_s, step_s) == pytest.approx(known[:2], rel=0.05)
        assert copy_s == pytest.approx(known[2], abs=0.001)
        assert wait == pytest.approx(known[3], abs=0.04)


class SlowToPin(dict):
    """Takes 20 ms for it."""

    def pin_memory(self):
        time.sleep(0.02)
        return SlowToPin({name: value.pin_memory() for name, value in self.items()})


class OfOneKind:
    """A step that takes batches like the first alone, and pinned ones alone where all shall be once it is warm."""

    def __init__(self, model, pinned):
        self.model, self.pinned, self.first, self.steps = model, pinned, None, 0

    def __call__(self, _, batch):
        self.first, self.steps = batch if self.first is None else self.first, self.steps + 1
        assert type(batch) is type(self.first)
        assert all(torch.equal(value, self.first[name]) for name, value in batch.items())
        assert self.steps <= 10 or batch["x"].is_pinned() == self.pinned
        return self.model(batch["x"].to("sim", non_blocking=True))


def stamped():
    """By configuration: seconds of pinning, of receiving, of waiting; and how many batches have stamps, of how many."""
    data, model, step = job(fetch_s=0.02, own=True)
    side = TrainingSide(model=model, train_step=step, device="sim")
    own = workload(
        data, BATCH, side, collate_fn=lambda rows: SlowToPin(torch.utils.data.default_collate(rows))
    )
    found = {}
    with opened(own) as probe:
        for config in (PINNED, PAGEABLE, AHEAD, LoaderConfig(pin_memory=True)):
            burst = measured(probe.probe, config, PLAN)
            stamps = [each for each in burst.traces if each.pin_end is not None]
            assert all(
                each.collate_end <= each.pin_start <= each.pin_end <= each.received
                for each in stamps
            )
            waited_s = sum(each.wait_s for each in burst.traces[1:]) / len(burst.traces[1:])
            found[config] = burst.pin_s, burst.receive_s, waited_s, len(stamps) / len(burst.traces)
    return found


def test_the_thread_that_pins_leaves_its_times_and_workers_that_bind_are_waited_for(simulated):
    # GIVEN a worker that takes 80 ms for a batch, a thread that takes 20 to pin it, and a step of 10
    found = simulated.call(stamped)
    for config in (PINNED, AHEAD):
        pin_s, receive_s, waited_s, share = found[config]
        assert (pin_s, share) == (pytest.approx(0.02, abs=0.005), 1)
        # THEN what the loop waits for is neither the worker's nor the thread's time taken for that of receiving
        assert 5 * receive_s < waited_s or config == AHEAD
    assert [
        (found[each][0], found[each][3]) for each in (PAGEABLE, LoaderConfig(pin_memory=True))
    ] == [(None, 0)] * 2


def handed_over():
    """What loops on copies measure, pinned and not."""
    found = []
    for config in (PINNED, PAGEABLE):
        data, model, _ = job(fetch_s=0.1, copy_s=0.02, step_s=0.01)
        side = TrainingSide(
            model=model, train_step=OfOneKind(model, config.pin_memory), device="sim"
        )
        with opened(workload(data, BATCH, side)) as probe:
            found.append(probe.probe.hand_over(config, PLAN))
    return [
        (BATCH / each.samples_per_s.value, each.step_s, each.pin_s is None, each.copy_s)
        for each in found
    ]


def test_handing_over_is_measured_with_its_copies_and_without_the_dataset(simulated):
    for found, known in zip(
        simulated.call(handed_over), ((0.03, False, 0.02), (0.05, True, 0.04)), strict=True
    ):
        period_s, step_s, is_pageable, copy_s = found
        assert (period_s, step_s) == pytest.approx((known[0], known[0]), rel=0.1)
        assert (is_pageable, copy_s) == (known[1], pytest.approx(known[2], abs=0.002))


UUID = "aaaaaaaa-1111-2222"
DEVICE = f"GPU-{UUID} 50000 {{mig}} 0 0 {3 << 30} 1000:64"
"""Of the stand-in of NVML: 64% busy with all that runs there."""


def told_by_nvml(environ):
    os.environ.update(environ)
    data, model, _ = job(step_s=0.010)
    result = tune(
        data, model, batch_size=BATCH, device="sim", max_workers=1, budget=3, progress=False
    )
    measured = result.measurement_of(result.best)
    frame = result.to_dataframe()[["gpu_utilization", "gpu_used_bytes"]].dropna().drop_duplicates()
    notes = [each.sentence for each in result.warnings if "NVML" in each.sentence]
    return (
        measured.gpu_utilization,
        result.gpu_utilization,
        frame.gpu_used_bytes.tolist(),
        notes,
        result.report(),
    )


@pytest.mark.parametrize("mig", [0, 1])
def test_tune_tells_what_nvml_tells_or_once_why_it_tells_nothing(simulated, tmp_path, mig):
    environ = {
        "SIMULATED_NVML": f"{built_nvml(tmp_path)} {UUID}",
        "NVML_STANDIN": DEVICE.format(mig=mig),
    }
    of_best, share, used_bytes, notes, report = simulated.call(told_by_nvml, environ)
    if mig:
        assert (of_best, share, used_bytes) == (None, None, [])
        assert notes == [
            "NVML does not tell the utilization of sim: it tells none of MIG instances."
        ]
    else:
        assert of_best == share == pytest.approx(0.64)
        assert (set(used_bytes), notes) == ({3 << 30}, [])
    assert ("GPU 64% busy (NVML)." in report) != bool(mig)


def compared():
    data, model, _ = job(**COPY_BOUND)
    sides = {
        str(each.pin_memory): DataLoader(data, BATCH, **each.to_kwargs())
        for each in (PAGEABLE, PINNED)
    }
    found = compare(sides, model, device="sim", budget=5, progress=False)
    return found.ratios["True"].value, {side.name: side.bottleneck.kind for side in found.sides}


def test_compare_tells_what_pinning_brings(simulated):
    ratio, kinds = simulated.call(compared)
    assert ratio == pytest.approx(70 / 40, rel=0.05)
    assert kinds == {"False": "copy", "True": "copy"}


def prefetched(copy_s, step_s, depth):
    """Seconds of a batch, and what CUDA would have read too soon or overwritten too early."""
    torch.sim.configure(bytes_per_s=BYTES / copy_s)
    batches = DevicePrefetcher(
        [torch.full((BYTES // 4,), float(each)).pin_memory() for each in range(8)], "sim", depth
    )
    means, marks = [], []
    for batch in batches:
        torch.sim.work(step_s, batch)
        means.append(batch.mean())
        marks.append(torch.sim.current_stream().record_event(torch.sim.Event(enable_timing=True)))
    torch.sim.synchronize()
    return marks[0].elapsed_time(marks[-1]) / 7e3, torch.stack(means).tolist(), torch.sim.hazards()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("copy_s", "step_s"), [(0.015, 0.030), (0.030, 0.015)])
def test_batches_copied_ahead_are_whole_and_cost_the_longer_of_copy_and_step(
    simulated, copy_s, step_s, depth
):
    period_s, values, hazards = simulated.call(prefetched, copy_s, step_s, depth)
    assert (values, hazards) == ([float(each) for each in range(8)], [])
    assert period_s == pytest.approx(0.030, rel=0.05)


def test_views_of_one_storage_on_the_device_travel_once(simulated):
    simulated.call(assert_views_travel_once, "sim")


def failing(trouble):
    """What tune() says of a step with trouble on the device, once it is warm."""
    data, model, _ = job()

    def step(model, batch):
        model.steps = getattr(model, "steps", 0) + 1
        if model.steps > 30 and trouble == "kernel":
            torch.sim.fail()
        held = (
            torch.empty(1 << 34, device="sim") if model.steps > 30 and trouble == "memory" else None
        )
        return model(batch["x"].to("sim")) if held is None else None

    return said(data, model, step)


def in_use():
    """Where a model can only be forked, and this process uses the device."""
    data, _, _ = job()
    return said(
        data, torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)).to("sim")
    )


def too_large_to_copy_in_seconds():
    """Where the data are more than is copied as long as a fork would do, and this process uses the device."""
    parent.LARGEST_PAYLOAD_BYTES = 1 << 20
    data, model = (
        torch.utils.data.TensorDataset(torch.zeros(4096, 256)),
        torch.nn.Linear(256, 1).to("sim"),
    )
    side = TrainingSide(
        model=model, train_step=lambda model, batch: model(batch[0].to("sim")).mean(), device="sim"
    )
    with opened(workload(data, BATCH, side)) as probe:
        return f"in forks: {[note for note in probe.notes if 'forks' in note]}"


class InPlace(dict):
    """A batch that moves and pins itself, as those of transformers and PyTorch Geometric do."""

    def to(self, device, non_blocking):
        self["x"] = self["x"].to(device, non_blocking=non_blocking)
        return self

    def pin_memory(self):
        self["x"] = self["x"].pin_memory()
        return self


def in_place():
    data, model, _ = job()
    return said(
        DataLoader(
            data, BATCH, collate_fn=lambda rows: InPlace(torch.utils.data.default_collate(rows))
        ),
        model,
    )


class Length:
    """Its `to` goes to other units."""

    def to(self, unit):
        raise ValueError(f"no such unit: {unit}")


def moved_in_parts():
    """By a step of its own, which is all that knows how the batch moves."""
    data, model, step = job(own=True)
    return said(
        DataLoader(
            data, BATCH, collate_fn=lambda rows: {"x": rows[0]["x"][None], "length": Length()}
        ),
        model,
        step,
    )


def without_room():
    """Where the device has no room for a second model."""
    torch.sim.configure(memory_bytes=600 << 20)
    return said([torch.zeros(1 << 14)] * 64, torch.nn.Linear(1 << 14, 1 << 12).to("sim"))


def said(data, model, step=None):
    data = data if isinstance(data, DataLoader) else DataLoader(data, BATCH)
    try:
        result = tune(data, model, train_step=step, device="sim", budget=2, progress=False)
    except WorkloadError as error:
        return str(error)
    return "\n".join([*result.summary, *result.warnings])


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ((failing, "kernel"), "device-side assert triggered"),
        ((failing, "memory"), "use a smaller batch, or free what else is on the device"),
        ((in_use,), "this process uses sim, which no fork of it can; train_step=0.05"),
        ((in_place,), " samples/s"),
        ((moved_in_parts,), " samples/s"),
        ((too_large_to_copy_in_seconds,), "in forks: []"),
        (
            (without_room,),
            "a second copy of the model on sim takes at least 0.8 GB, and 0.4 GB are free: move it",
        ),
    ],
)
def test_trouble_with_the_device_ends_tune_in_a_sentence(simulated, trouble, says):
    assert says in simulated.call(*trouble)
