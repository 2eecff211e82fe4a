from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys

import pytest

from autotune_loader.machine.gpus import GpuDevice, Gpus
from tests.support import FakeGpu, FakeGpus

FAST = FakeGpu(uuid="GPU-fast", name="Fast", util=80)
SLOW = FakeGpu(uuid="GPU-slow", name="Slow", util=20)

VALUES = {
    "util": "nvmlDeviceGetUtilizationRates",
    "memory_bytes": "nvmlDeviceGetMemoryInfo",
}


def first_device(gpus: Gpus) -> GpuDevice:
    return gpus.devices()[0]


def test_the_device_that_cuda_calls_0_is_watched_whatever_nvmls_order() -> None:
    # GIVEN NVML listing the slow GPU first, and CUDA the fast one
    gpus = Gpus(FakeGpus([SLOW, FAST]), cuda_uuids=["fast", "slow"], environ={})
    # WHEN cuda:0 is sampled
    device = first_device(gpus)
    # THEN it is the fast one
    assert (device.cuda_index, device.name) == (0, "Fast")
    assert gpus.sample(device).util == 0.8


def test_without_cudas_list_the_mask_decides() -> None:
    gpus = Gpus(FakeGpus([SLOW, FAST]), environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert [device.name for device in gpus.devices()] == ["Fast"]


def test_a_sample_has_every_value_in_si_units() -> None:
    gpus = Gpus(FakeGpus([FAST]), environ={})
    sample = gpus.sample(first_device(gpus))
    assert (sample.util, sample.memory_bytes) == (0.8, 1 << 30)
    assert sample.reasons == {}


@pytest.mark.parametrize(("value", "function"), VALUES.items())
def test_an_unsupported_call_is_none_with_its_reason_and_the_rest_is_there(value: str, function: str) -> None:
    # GIVEN a GPU that refuses one call, as MIG, WSL2 and Jetson do
    gpus = Gpus(FakeGpus([FAST], unsupported=[function]), environ={})
    # WHEN it is sampled
    sample = gpus.sample(first_device(gpus))
    # THEN what depends on the call is missing, with the reason, and nothing else
    assert getattr(sample, value) is None
    assert sample.reasons[value] == f"{function}: Not Supported"
    assert set(sample.reasons) == {name for name, needed in VALUES.items() if needed == function}


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetName", "nvmlSystemGetDriverVersion", "nvmlDeviceGetMaxMigDeviceCount"]
)
def test_devices_are_listed_whatever_nvml_keeps_to_itself(function: str) -> None:
    gpus = Gpus(FakeGpus([FAST], unsupported=[function]), environ={})
    assert [device.uuid for device in gpus.devices()] == ["GPU-fast"]


def test_a_lost_gpu_keeps_its_place() -> None:
    # GIVEN a first GPU that does not tell its UUID any more
    lost = FakeGpu(uuid="GPU-lost", unsupported=frozenset({"nvmlDeviceGetUUID"}))
    gpus = Gpus(FakeGpus([lost, FAST]), environ={"CUDA_VISIBLE_DEVICES": "1"})
    # THEN index 1 is still the second
    assert [device.name for device in gpus.devices()] == ["Fast"]


def test_a_mig_instance_has_memory_but_no_utilisation() -> None:
    # GIVEN an instance that refuses what NVML refuses for MIG
    mig = FakeGpu(uuid="MIG-1", name="MIG 1g.10gb", unsupported=frozenset({"nvmlDeviceGetUtilizationRates"}))
    gpus = Gpus(FakeGpus([FakeGpu(uuid="GPU-whole", migs=(mig,))]), environ={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    # WHEN it is sampled
    sample = gpus.sample(first_device(gpus))
    # THEN utilisation is missing, never zero
    assert (sample.util, sample.memory_bytes) == (None, 1 << 30)


def test_a_machine_without_a_driver_has_one_reason_and_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    # GIVEN no driver
    nvml = FakeGpus(has_driver=False)
    gpus = Gpus(nvml, environ={})
    # WHEN everything is asked
    with caplog.at_level(logging.DEBUG, logger="autotune_loader"):
        answers = (gpus.devices(), gpus.driver, gpus.reason, gpus.devices())
    # THEN nothing is raised, NVML was tried once, and it was said once
    assert answers == ((), None, "nvmlInit: NVML Shared Library Not Found", ())
    assert (nvml.calls, len(caplog.records)) == (["nvmlInit"], 1)


def test_a_sample_without_a_driver_has_the_reason_for_every_value() -> None:
    device = GpuDevice(cuda_index=0, uuid="GPU-x", name="x", memory_bytes=None)
    sample = Gpus(FakeGpus(has_driver=False), environ={}).sample(device)
    assert (sample.util, sample.memory_bytes) == (None, None)
    assert sample.reasons == dict.fromkeys(VALUES, "nvmlInit: NVML Shared Library Not Found")


def test_nvml_is_not_touched_before_the_first_question() -> None:
    nvml = FakeGpus([FAST])
    gpus = Gpus(nvml, environ={})
    gpus.close()
    assert nvml.calls == []


def test_closing_releases_nvml_and_a_later_question_starts_it_again() -> None:
    # GIVEN NVML in use
    nvml = FakeGpus([FAST])
    gpus = Gpus(nvml, environ={})
    # WHEN it is closed and asked again
    before = gpus.driver
    gpus.close()
    after = gpus.driver
    # THEN it was started twice and answers the same
    assert (before == after, nvml.calls.count("nvmlInit"), nvml.calls.count("nvmlShutdown")) == (True, 2, 1)


def test_a_binding_without_a_function_is_a_reason() -> None:
    # GIVEN an old binding
    class Old(FakeGpus):
        nvmlDeviceGetUtilizationRates = property()  # type: ignore[assignment]  # noqa: N815

    gpus = Gpus(Old([FAST]), environ={})
    # THEN
    assert gpus.sample(first_device(gpus)).reasons == {
        "util": "nvmlDeviceGetUtilizationRates: this pynvml does not have it"
    }


@pytest.mark.process
def test_the_real_binding_is_clean_under_errors_for_warnings() -> None:
    # GIVEN the module pynvml of nvidia-ml-py, not of the deprecated distribution of that name
    assert importlib.metadata.version("nvidia-ml-py")
    # WHEN this machine's GPUs are listed with warnings as errors THEN nothing is raised
    script = "from autotune_loader.machine.gpus import Gpus; g = Gpus(); print(len(g.devices()), g.reason is None)"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_fake_has_only_names_that_the_real_binding_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeGpus) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
