"""What NVML tells of a GPU, by a stand-in of its library (`tests/support/accelerator/nvml.c`) whose
devices' use is known."""

import ctypes
import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from autotune_loader.machine import nvml
from autotune_loader.machine.nvml import GpuMeter, GpuUse
from tests.support import FakeClock
from tests.support.accelerator import built_nvml, compiler

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(compiler() is None, reason="needs a compiler"),
]

MIB, EPOCH_S = 1 << 20, 1_000_000_000.0
NO_PERMISSION, NOT_SUPPORTED, DRIVER_NOT_LOADED = 4, 3, 9
TIME_US = ctypes.c_longlong
FAST_US, SLOW_US = 150_000, 1_000_000
"""Of NVML's samples."""


def gpu(name, levels="1000:50", *, us=FAST_US, mig=0, rates=0, samples=0, mib=100, kind="GPU"):
    """A device of the stand-in: microseconds and percent of its levels, what it tells."""
    return f"{kind}-{name * 8}-1111-2222 {us} {mig} {rates} {samples} {mib * MIB} {levels}"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return ctypes.CDLL(str(built_nvml(tmp_path_factory.mktemp("nvml"))))


class Machine:
    """Some GPUs, which CUDA counts in its own order, and a clock that moves as threads wait."""

    def __init__(self, library, monkeypatch):
        self.library, self.patch, self.clock, self.looks = library, monkeypatch, FakeClock(), []
        library.standin_mean.argtypes = ctypes.c_int, TIME_US, TIME_US
        library.standin_mean.restype = ctypes.c_double
        clock = SimpleNamespace(monotonic=self.clock, time=lambda: EPOCH_S + self.clock())
        threads = SimpleNamespace(Event=lambda: self, Thread=self.thread)
        for module, name, stand_in in (
            (pynvml, "CDLL", lambda name: library),
            (pynvml, "nvmlLib", None),
            (pynvml, "_nvmlGetFunctionPointer_cache", {}),
            (nvml, "time", clock),
            (nvml, "threading", threads),
        ):
            monkeypatch.setattr(module, name, stand_in)
        self.set = lambda: None  # what ends a look is the clock
        self.go_to(100.0)

    def have(self, *gpus, order=(0,)):
        """These GPUs as NVML counts them, of which CUDA sees some in its own `order`."""
        uuids = [each.split()[0].partition("-")[2] for each in gpus]

        def properties(device):
            return SimpleNamespace(uuid=uuids[order[torch.device(device).index or 0]])

        self.patch.setenv("NVML_STANDIN", "\n".join(gpus))
        self.patch.setattr(torch.cuda, "get_device_properties", properties)

    def go_to(self, moment):
        self.clock.now = moment
        TIME_US.in_dll(self.library, "standin_now_us").value = self.us(moment)

    @staticmethod
    def us(moment):
        return round((EPOCH_S + moment) * 1e6)

    def thread(self, target, daemon):
        return SimpleNamespace(start=lambda: self.looks.append(target))

    def wait(self, seconds):
        self.go_to(min(self.clock() + seconds, self.ends))
        return self.clock() >= self.ends

    def window(self, meter, seconds):
        """What the meter tells of a window that begins now, and what is true of it."""
        start = self.clock()
        self.ends = start + seconds
        meter.begin()
        while self.looks:
            self.looks.pop()()
        self.go_to(self.ends + 1.0)  # what comes after it is not of it
        true = self.library.standin_mean(0, self.us(start), self.us(self.ends)) / 100
        return meter.end(start, self.ends), true


@pytest.fixture
def machine(library, monkeypatch):
    return Machine(library, monkeypatch)


THREE = gpu("a", "1000:10"), gpu("b", "1000:64"), gpu("c", "1000:90")


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.90), ("cuda:1", 0.10)])
def test_a_gpu_is_found_by_its_uuid(machine, device, share):
    machine.have(*THREE, order=(2, 0))
    meter = GpuMeter(device)
    assert meter.why_none == ""
    assert meter.now() == GpuUse(share, 100 * MIB)
    assert machine.window(meter, 1.0)[0] == pytest.approx((share, 100 * MIB))


LATE, BUSY_AFTER_5_S = "20000:100,11000:0", "5000000:0,5000000:90"


@pytest.mark.parametrize(("device", "at", "seconds", "tells", "mib"), [
    (gpu("a", "1000:64"), 100.0, 0.5, True, 100),
    (gpu("a", LATE), 100.03, 1.0, True, 100),
    (gpu("a", "300000:100,400000:20"), 100.1, 3.0, True, 100),
    # what was before the window, and is in the first sample that ends in it, does not count
    (gpu("a", BUSY_AFTER_5_S), 105.01, 0.5, True, 100),
    (gpu("a", BUSY_AFTER_5_S), 109.0, 0.95, True, 100),
    (gpu("a", BUSY_AFTER_5_S, us=SLOW_US), 105.3, 3.0, True, 100),
    (gpu("a", BUSY_AFTER_5_S, samples=NOT_SUPPORTED), 105.01, 2.0, True, 100),
    (gpu("a", BUSY_AFTER_5_S, us=SLOW_US, samples=NOT_SUPPORTED), 105.01, 3.0, True, 100),
    (gpu("a", LATE, samples=NO_PERMISSION, mig=-1), 100.03, 3.0, True, 100),
    # of a window that is too short NVML's mean would be of what was before
    (gpu("a", BUSY_AFTER_5_S, us=SLOW_US), 105.1, 0.5, False, 100),
    (gpu("a", BUSY_AFTER_5_S, samples=NOT_SUPPORTED), 105.1, 0.9, False, 100),
    # memory that CPU and GPU share belongs to neither
    (gpu("a", BUSY_AFTER_5_S, us=SLOW_US, mib=0), 105.1, 0.5, False, None),
])  # fmt: skip
def test_a_windows_use_is_told_within_5_points(machine, device, at, seconds, tells, mib):
    machine.have(device)
    meter = GpuMeter("cuda")
    machine.go_to(at)
    assert meter.why_none == ""
    use, true_share = machine.window(meter, seconds)
    assert use.utilization == (pytest.approx(true_share, abs=0.05) if tells else None)
    assert use.used_bytes == (mib and mib * MIB)


MIG, NOT_FOUND = "it tells none of MIG instances", "NVML Shared Library Not Found"
NOT_INSTALLED = "No module named 'pynvml'. Try pip install nvidia-ml-py."


@pytest.mark.parametrize(("device", "error", "why"), [
    (gpu("a", mig=1), None, MIG),
    (gpu("a", kind="MIG"), None, MIG),
    (gpu("a", rates=NO_PERMISSION), None, "Insufficient Permissions"),
    (gpu("a", rates=NOT_SUPPORTED), None, "Not Supported"),
    (gpu("a"), DRIVER_NOT_LOADED, "Driver Not Loaded"),
    (gpu("a"), OSError, NOT_FOUND),
    (gpu("a"), ImportError, NOT_INSTALLED),
    (gpu("a"), LookupError, "it has no device GPU-aaaaaaaa-1111-2222"),
])  # fmt: skip
def test_without_a_figure_one_sentence_says_why(machine, device, error, why, monkeypatch):
    machine.have(device)
    if error is LookupError:
        monkeypatch.setenv("NVML_STANDIN", gpu("b"))
    elif error is OSError:
        monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL("/nowhere/libnvidia-ml.so.1"))
    elif error is ImportError:
        monkeypatch.delitem(sys.modules, "pynvml")
        monkeypatch.setattr(sys, "path", [])
    elif error is not None:
        monkeypatch.setenv("NVML_STANDIN_ERROR", str(error))
    meter = GpuMeter("cuda:0")
    assert meter.why_none == f"NVML does not tell the utilization of cuda:0: {why}."
    assert meter.now() == GpuUse()
    assert machine.window(meter, 2.0)[0] == GpuUse()


def test_of_another_accelerator_nothing_is_said(monkeypatch):
    another = SimpleNamespace(name="another")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: another)
    meter = GpuMeter("cuda")
    assert meter.why_none == ""
    assert meter.now() == GpuUse()
    assert meter.end(0.0, 1.0) == GpuUse()
