"""Which GPUs CUDA shows for a mask or an order, and what NVML says of them; a refused call takes its own value only."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from autotune_loader.machine.gpus import STAMP_CLOCKS, Gpus, busy_within
from tests.support import FakeGpu, FakeGpus
from tests.support.gpus import ANSWERS

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"
MIG_1, MIG_2, MIG_3 = "MIG-1111-aa", "MIG-2222-bb", "MIG-3333-cc"
PLAIN = (FakeGpu(uuid=A), FakeGpu(uuid=B), FakeGpu(uuid=C))
SPLIT = (
    FakeGpu(uuid=A, migs=(FakeGpu(uuid=MIG_1), FakeGpu(uuid=MIG_2))),
    FakeGpu(uuid=B, migs=(FakeGpu(uuid=MIG_3),)),
    FakeGpu(uuid=C),
)
# The expected devices stand here one by one: what CUDA shows for a mask is not computed a second time.
VISIBLE: dict[str | None, tuple[list[str], list[str]]] = {
    # mask: on three plain GPUs, where MIG splits two of them
    None: ([A, B, C], [MIG_1, MIG_3, C]),
    "": ([], []),
    "0": ([A], [MIG_1]),
    "2,0": ([C, A], [C, MIG_1]),
    " 1 , 2 ": ([B, C], [MIG_3, C]),
    "0,-1,2": ([A], [MIG_1]),  # the first invalid entry ends the list
    "1,1": ([], []),  # a repeated one empties it
    C: ([C], [C]),
    "GPU-aa": ([], []),  # ambiguous
    f"GPU-cccc,{A}": ([C, A], [C, MIG_1]),
    f"{B},GPU-ffff,{A}": ([B], [MIG_3]),
    MIG_2: ([], [MIG_2]),
}


@pytest.mark.parametrize("mask", VISIBLE)
def test_a_mask_shows_what_cuda_shows(mask: str | None) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    for machine, visible in zip((PLAIN, SPLIT), VISIBLE[mask], strict=True):
        devices = Gpus(FakeGpus(machine), environ=environ).devices()
        assert [(each.cuda_index, each.uuid) for each in devices] == list(enumerate(visible))


def test_cudas_own_list_finds_its_devices_in_its_order() -> None:
    # GIVEN CUDA's UUIDs, written without NVML's prefix, and one that NVML does not know
    order = [C, A, MIG_3]
    cuda = ["unknown", *(uuid[4:] for uuid in order)]
    # THEN each ordinal has its own device, whatever the mask says
    devices = Gpus(FakeGpus(SPLIT), cuda_uuids=cuda, environ={"CUDA_VISIBLE_DEVICES": "0"}).devices()
    assert [(each.cuda_index, each.uuid) for each in devices] == list(enumerate(order, start=1))


FOUND = {"devices": 1, "uuid": A, "name": "H100", "memory_bytes": 16 << 30, "driver": "570.00", "samples": 2}


@pytest.mark.parametrize(
    ("refused", "lost"),
    [
        ("nvmlDeviceGetCount", {"devices": 0}),
        ("nvmlDeviceGetHandleByIndex", {"devices": 0}),
        ("nvmlDeviceGetUUID", {"uuid": "", "samples": 0}),
        ("nvmlDeviceGetName", {"name": "unknown GPU"}),
        ("nvmlDeviceGetMemoryInfo", {"memory_bytes": None}),
        ("nvmlDeviceGetMigDeviceHandleByIndex", {}),
        ("nvmlDeviceGetHandleByUUID", {"samples": 0}),
        ("nvmlDeviceGetSamples", {"samples": 0}),
        ("nvmlSystemGetDriverVersion", {"driver": None}),
    ],
)
def test_a_refused_call_takes_its_own_value_only(refused: str, lost: dict[str, object]) -> None:
    # GIVEN an NVML that refuses one call, as under MIG, WSL2 and on a Jetson
    gpu = FakeGpu(uuid=A, name="H100", samples=lambda: [(1.0, 20), (2.0, 40)])
    gpus = Gpus(FakeGpus([gpu], unsupported=[refused]), environ={})
    # WHEN all is asked THEN nothing is raised, and what needs another call is there
    found: dict[str, object] = {"devices": len(gpus.devices()), "driver": gpus.driver}
    for each in gpus.devices():
        found |= {name: getattr(each, name) for name in ("uuid", "name", "memory_bytes")}
        found["samples"] = len(gpus.recent_use(each))
    assert found.items() <= (FOUND | lost).items()
    assert gpus.reason is None


def test_a_machine_without_a_driver_has_one_reason_and_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeGpus(has_driver=False)
    gpus = Gpus(nvml, environ={})
    with caplog.at_level(logging.DEBUG, logger="autotune_loader"):
        answers = (gpus.devices(), gpus.driver, gpus.reason, gpus.devices())
    # THEN NVML was tried once, and it was said once
    assert answers == ((), None, "nvmlInit: NVML Shared Library Not Found", ())
    assert (nvml.calls, len(caplog.records)) == (["nvmlInit"], 1)


def test_the_fake_has_only_names_that_the_real_binding_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [*ANSWERS, *(name for name in vars(FakeGpus) if name.startswith("NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_a_short_window_has_the_utilisation_of_its_own_samples() -> None:
    # GIVEN samples every 0.1 s: idle before a window of 0.4 s, three quarters busy in it, busy after it
    samples = [(t / 10, share) for t, share in enumerate([0.0] * 6 + [0.5, 1.0, 0.5, 1.0] + [1.0] * 3)]
    # WHEN they are read for the window, and for one of which they cover a quarter THEN it is told how much they cover
    assert busy_within(samples, 0.5, 0.9) == pytest.approx((0.3, 0.4))
    assert busy_within(samples, 1.1, 1.5) == pytest.approx((0.1, 0.1))
    assert busy_within([], 0.5, 0.9) == busy_within(samples[:1], 0.0, 0.1) == (0.0, 0.0)
    idle = [(0.0, 0.0), (60.0, 1.0), (60.1, 1.0)]  # none is kept meanwhile
    assert busy_within(idle, 0.0, 60.1) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("clock", STAMP_CLOCKS)
def test_stamps_of_either_clock_become_seconds_ago(clock: Callable[[], float]) -> None:
    # GIVEN a driver that stamps its samples by the time of day, or since boot
    gpu = FakeGpu(uuid=A, samples=lambda: [(clock() - 0.2, 40), (clock() - 0.3, 20)])
    gpus = Gpus(FakeGpus([gpu]), environ={})
    # WHEN asked for what it keeps THEN
    (older, younger) = gpus.recent_use(gpus.devices()[0])
    assert older == (pytest.approx(0.3, abs=0.05), 0.2)
    assert younger == (pytest.approx(0.2, abs=0.05), 0.4)
