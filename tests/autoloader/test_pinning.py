"""Memory that is pinned where it lies: nothing is unmapped before devices are done with it."""

# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import ctypes
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune_loader.autoloader import pinning
from autotune_loader.autoloader.pinning import MOST_REFUSALS, Pinner, pinner_for

OK, NOT_READY, REFUSED = 0, 600, 801


class Driver:
    """libcuda.so.1 of one device in use, which does what it is told."""

    def __init__(self) -> None:
        self.registered, self.recorded, self.passed = set[int](), list[int](), set[int]()
        self.record = self.register = self.unregister = OK
        self.made = self.depth = 0
        self.is_active = 1

    def cuDeviceGet(self, device: Any, number: int) -> int:
        return OK

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, is_active: Any) -> int:
        is_active._obj.value = self.is_active
        return OK

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 7
        return OK

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.depth += 1
        return OK

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.depth -= 1
        return OK

    def cuEventCreate(self, event: Any, flags: int) -> int:
        self.made += 1
        event._obj.value = 100 + self.made
        return OK

    def cuCtxRecordEvent(self, context: Any, event: Any) -> int:
        if not self.record:
            self.recorded.append(event.value)
            self.passed.discard(event.value)
        return self.record

    def cuEventQuery(self, event: Any) -> int:
        assert self.depth == 1
        return OK if event.value in self.passed else NOT_READY

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:
        if not self.register:
            self.registered.add(address.value)
        return self.register

    def cuMemHostUnregister(self, address: Any) -> int:
        if not self.unregister:
            self.registered.remove(address.value)
        return self.unregister

    def pass_all(self) -> None:
        self.passed.update(self.recorded)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("a context is made"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(pinning, "_pinner", pinning._pinner.__wrapped__)
    return driver


def test_forgotten_memory_is_unmapped_once_devices_are_done(driver: Driver) -> None:
    pinner, unmapped = Pinner(), list[int]()
    page = set(driver.registered)  # its own
    for address in (4096, 8192, 12288):
        assert pinner.pin(address, 4096)
    for address in (4096, 8192):
        pinner.forget(address, lambda address=address: unmapped.append(address))  # type: ignore[misc]
    pinner.sweep()
    assert unmapped == []
    assert driver.registered - page == {4096, 8192, 12288}
    driver.pass_all()
    pinner.sweep()
    assert unmapped == [4096, 8192]
    assert driver.registered - page == {12288}
    driver.unregister = REFUSED  # WHERE the driver keeps it THEN it stays mapped
    pinner.forget(12288, lambda: unmapped.append(12288))
    pinner.sweep()
    driver.pass_all()
    pinner.sweep()
    assert unmapped == [4096, 8192]
    assert driver.depth == 0


def test_events_are_reused_whatever_became_of_their_fence(driver: Driver) -> None:
    pinner = Pinner()
    for number in range(20):
        driver.record = REFUSED if number % 3 == 0 else OK
        fence = pinner.fence()
        assert (fence is None) == (number % 3 == 0)
        if fence is not None:
            assert not fence.is_passed()
            if number % 2:
                driver.pass_all()
                assert fence.is_passed()
        del fence
    assert driver.made == 1


def test_nothing_is_pinned_where_no_fence_can_come(driver: Driver) -> None:
    pinner, elsewhere = Pinner(), list[bool]()
    thread = threading.Thread(target=lambda: elsewhere.append(pinner.pin(4096, 4096)))
    thread.start()
    thread.join()
    assert elsewhere == [False]
    driver.record = REFUSED
    for _ in range(MOST_REFUSALS):
        assert pinner.pin(4096, 4096)
        assert pinner.fence() is None
    assert not pinner.pin(4096, 4096)


@pytest.mark.parametrize(
    ("asked", "broken", "cuda", "is_pinned"),
    [
        ({}, {}, {}, True),
        ({"pin_memory_device": "cuda:0"}, {}, {}, True),
        ({"pin_memory_device": "xpu"}, {}, {}, False),
        ({"pin_memory": False}, {}, {}, False),
        ({}, {"register": REFUSED}, {}, False),
        ({}, {"record": REFUSED}, {}, False),
        ({}, {"cuCtxRecordEvent": None}, {}, False),  # an old driver
        ({}, {}, {"is_initialized": lambda: False}, False),
        ({}, {}, {"is_current_stream_capturing": lambda: True}, False),
    ],
)
def test_torchs_thread_pins_where_the_driver_cannot(
    driver: Driver,
    asked: Any,
    broken: Any,
    cuda: Any,
    is_pinned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in broken.items():
        setattr(driver, name, value) if value is not None else monkeypatch.delattr(Driver, name)
    loader = SimpleNamespace(**{"pin_memory": True, **asked})
    assert (pinner_for(loader) is not None) == is_pinned
    assert driver.made == 0 or not cuda  # nothing was asked


def test_a_context_made_later_serves_the_next_loop(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_pinner", functools.lru_cache(maxsize=1)(pinning._pinner))
    loader = SimpleNamespace(pin_memory=True)
    driver.is_active = 0
    assert pinner_for(loader) is None
    driver.is_active = 1
    assert pinner_for(loader) is pinner_for(loader) is not None
