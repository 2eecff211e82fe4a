"""Every visible-device mask with every order, with and without MIG, a driver, and each call: nothing raises or is made up.

The expected devices stand in tables, one by one: what CUDA shows for a mask is not computed here a second time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import pytest

from autotune_loader.machine.gpus import Gpus, GpuSample
from autotune_loader.machine.meters.process_tree import TreeMeter
from tests.support import FakeGpu, FakeGpus

A, B, C = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-cccc3333-0000"
MIG_1, MIG_2, OLD_MIG = "MIG-1111-aa", "MIG-2222-bb", "MIG-GPU-bbbb2222-0000/7/0"
NO_UTILISATION = frozenset({"nvmlDeviceGetUtilizationRates"})


def mig(uuid: str) -> FakeGpu:
    return FakeGpu(uuid=uuid, name="MIG 1g", unsupported=NO_UTILISATION)


PLAIN = (FakeGpu(uuid=A), FakeGpu(uuid=B), FakeGpu(uuid=C))
SPLIT = (FakeGpu(uuid=A, migs=(mig(MIG_1), mig(MIG_2))), FakeGpu(uuid=B, migs=(mig(OLD_MIG),)), FakeGpu(uuid=C))
# In NVML's order, then in the reverse; what CUDA counts does not depend on it where CUDA's own UUIDs are known.
MACHINES = {"plain": PLAIN, "split": SPLIT, "none": ()}
VISIBLE: dict[tuple[str | None, str], list[str]] = {
    (None, "plain"): [A, B, C],
    (None, "split"): [MIG_1, OLD_MIG, C],
    ("", "plain"): [],
    ("", "split"): [],
    ("-1", "plain"): [],
    ("-1", "split"): [],
    ("0", "plain"): [A],
    ("0", "split"): [MIG_1],
    ("2,0", "plain"): [C, A],
    ("2,0", "split"): [C, MIG_1],
    ("0,9,1", "plain"): [A],
    ("0,9,1", "split"): [MIG_1],
    ("1,1", "plain"): [],
    ("1,1", "split"): [],
    (C, "plain"): [C],
    (C, "split"): [C],
    ("GPU-bbbb", "plain"): [B],
    ("GPU-bbbb", "split"): [OLD_MIG],
    (f"GPU-cccc,{A}", "plain"): [C, A],
    (f"GPU-cccc,{A}", "split"): [C, MIG_1],
    (MIG_2, "plain"): [],
    (MIG_2, "split"): [MIG_2],
    ("MIG-2222", "plain"): [],
    ("MIG-2222", "split"): [MIG_2],
    (OLD_MIG, "plain"): [],
    (OLD_MIG, "split"): [OLD_MIG],
    ("GPU-ffff", "plain"): [],
    ("GPU-ffff", "split"): [],
    ("nonsense", "plain"): [],
    ("nonsense", "split"): [],
}
CALLS = sorted(name for name in vars(FakeGpus) if name.startswith("nvml") and name not in ("nvmlInit", "nvmlShutdown"))
UNSUPPORTED = [(), *((call,) for call in CALLS), tuple(CALLS)]
# Without these no device can be told from another, or found at all.
IDENTITY = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"}
MIG_IDENTITY = {"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"}


def opened(
    machine: str, mask: str | None, cuda: Sequence[str] | None, *, has_driver: bool = True, refuses: Sequence[str] = ()
) -> Gpus:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    nvml = FakeGpus(MACHINES[machine], has_driver=has_driver, unsupported=refuses)
    return Gpus(nvml, cuda_uuids=cuda, environ=environ)


def bare(uuids: Sequence[str]) -> list[str]:
    """As torch writes them."""
    return [uuid.removeprefix("GPU-").removeprefix("MIG-") if "/" not in uuid else uuid for uuid in uuids]


@pytest.mark.parametrize(("mask", "machine"), VISIBLE)
def test_every_mask_shows_what_cuda_shows_whether_or_not_cuda_was_asked(mask: str | None, machine: str) -> None:
    # GIVEN what CUDA shows for the mask
    visible = VISIBLE[mask, machine]
    # WHEN the mask alone is read, and when CUDA told its UUIDs
    by_mask, by_uuid = opened(machine, mask, None), opened(machine, mask, bare(visible))
    # THEN both find these devices under CUDA's numbers
    for gpus in (by_mask, by_uuid):
        assert [(each.cuda_index, each.uuid) for each in gpus.devices()] == list(enumerate(visible))


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C])))
def test_every_order_of_cuda_finds_its_devices(order: tuple[str, ...]) -> None:
    gpus = opened("plain", None, bare(order))
    assert [device.uuid for device in gpus.devices()] == list(order)


@pytest.mark.parametrize("asked_cuda", [False, True])
@pytest.mark.parametrize(("mask", "machine"), VISIBLE)
def test_a_refused_call_takes_its_value_and_nothing_else(mask: str | None, machine: str, asked_cuda: bool) -> None:
    visible = VISIBLE[mask, machine]
    for refuses in UNSUPPORTED:
        # WHEN NVML refuses one call, or all
        gpus = opened(machine, mask, bare(visible) if asked_cuda else None, refuses=refuses)
        devices = gpus.devices()
        # THEN the devices are there, unless they cannot be told apart any more
        unknown = IDENTITY if machine == "plain" else IDENTITY | MIG_IDENTITY
        if not unknown & set(refuses):
            assert [device.uuid for device in devices] == visible
        # THEN every value that is missing has its reason
        for device in devices:
            sample = gpus.sample(device)
            names = [name for name in GpuSample.__dataclass_fields__ if name != "reasons"]
            assert {name for name in names if getattr(sample, name) is None} == set(sample.reasons)


@pytest.mark.parametrize("asked_cuda", [False, True])
@pytest.mark.parametrize(("mask", "machine"), VISIBLE)
def test_without_a_driver_there_is_no_device_and_one_reason(mask: str | None, machine: str, asked_cuda: bool) -> None:
    gpus = opened(machine, mask, bare(VISIBLE[mask, machine]) if asked_cuda else None, has_driver=False)
    assert (gpus.devices(), gpus.driver, gpus.reason) == ((), None, "nvmlInit: NVML Shared Library Not Found")


@pytest.mark.parametrize("mask", [None, "", "0", A])
def test_a_driver_without_a_gpu_shows_none(mask: str | None) -> None:
    assert opened("none", mask, None).devices() == ()


def test_a_meter_of_a_gpu_that_nvml_does_not_know_has_no_figures_and_says_why() -> None:
    # GIVEN a device of CUDA that NVML does not list
    with TreeMeter(os.getpid(), usable_cores=1, gpus=opened("plain", None, ["ffff-unknown"])) as meter:
        pass
    # THEN nothing is made up
    gpu = meter.gpu_use(None)
    assert (gpu.util, gpu.memory_bytes, gpu.reason) == (None, None, "NVML does not know the device")
