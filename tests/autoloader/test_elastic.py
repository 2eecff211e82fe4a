"""Torch's iterator made elastic: whatever is resized, kept or left, each sample comes once."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from autotune_loader import AutoLoader
from autotune_loader.autoloader import channel
from autotune_loader.autoloader import iterator as elastic
from autotune_loader.machine.elsewhere import descriptors
from autotune_loader.values import LoaderConfig
from tests.support.bursts import Made
from tests.support.schedules import FixedLoader, Noise, Numbers, Slow, Stream, Where

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

TWO, THREE, FOUR = (LoaderConfig(num_workers=number) for number in (2, 3, 4))


def one_twice(rows: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(rows)
    return x, y, y.detach()


def mapped() -> int:
    """Segments of batches that this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:batch")


@pytest.mark.parametrize("pins", [False, True])
def test_what_is_kept_stays_and_memory_is_reused(
    pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pins:
        imitate_pinning(monkeypatch)
    rows = Made(lambda n: (torch.full((40_000,), float(n)), torch.full((9_000,), n)), 160)
    how = {"num_workers": 2, "tune": False, "pin_memory": pins, "collate_fn": one_twice}
    kept, most = [], 0
    for number, (x, _, y) in enumerate(AutoLoader(rows, 4, **how)):
        expected = [float(4 * number + each) for each in range(4)]
        assert x[:, 0].tolist() == y[:, 0].tolist() == expected
        x += 1000  # the loop's own
        if number % 10 == 0:
            kept.append((number, y))
        time.sleep(0.005)  # GIVEN steps that take longer than batches
        most = max(most, mapped())
    assert all(y[:, 7].tolist() == [4 * number + each for each in range(4)] for number, y in kept)
    # THEN of 40 batches there are the few that are on their way, and those kept
    assert most < 2 * (2 * 2 * 2 + 2) + len(kept)
    del kept, x, y, _
    gc.collect()
    assert mapped() == 0


# fmt: off
def imitate_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's pinning thread, on a machine without an accelerator: pinning copies."""
    torchs, cuda = torch.accelerator, torch.cuda
    monkeypatch.setattr(torchs, "is_available", lambda: True)
    monkeypatch.setattr(torchs, "current_device_index", lambda: 0, raising=False)
    monkeypatch.setattr(torchs, "set_device_index", lambda index: None, raising=False)
    monkeypatch.setattr(torchs, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(cuda, "is_available", lambda: True)  # torch 2.6
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
# fmt: on


class Device:
    """What the CUDA driver is to a loop: it copies from pinned memory later."""

    def __init__(self) -> None:
        self.pinned, self.gone = set[int](), list[Any]()
        self.fences, self.waits = list[list[bool]](), 0
        self.captures = self.is_refusing = self.ends_waits = False

    def pin(self, address: int, size: int) -> bool:
        self.pinned.add(address)
        return True

    def may_ask(self) -> bool:
        return not self.captures

    def forget(self, address: int, unmap: Any) -> None:
        self.pinned.remove(address)
        self.gone.append(unmap)

    def sweep(self) -> None: ...

    def fence(self) -> Any:
        """Passed when the test says so."""
        if self.is_refusing:
            return None
        self.fences.append(passed := [False])

        def wait() -> None:
            self.waits += 1
            passed[0] = self.ends_waits

        return SimpleNamespace(is_passed=lambda: passed[0], wait=wait)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(elastic, "pinner_for", lambda loader: device)
    monkeypatch.setattr(channel, "pin", lambda data: data)
    return device


def large(batches: int) -> Any:
    """Batches of 512 KiB."""
    rows = Made(lambda index: (torch.full((1 << 15,), float(index)), index), 4 * batches)
    return AutoLoader(rows, batch_size=4, num_workers=3, tune=False, pin_memory=True)


def test_what_a_device_copies_from_is_not_written(device: Device) -> None:
    rng, copying, most = random.Random(0), list[Any](), 0
    for number, (x, y) in enumerate(large(100)):
        assert x.data_ptr() in device.pinned
        assert y.tolist() == [4 * number + each for each in range(4)]
        # WHEN the loop drops each batch, and the device reads it up to ten batches later
        until = number + rng.randrange(10)
        copying.append((until, x.data_ptr(), float(x[0, 0]), len(device.fences)))
        del x, y
        device.captures = number % 7 == 0
        device.is_refusing = number % 5 == 0
        for _, address, value, _ in copying:
            assert ctypes.c_float.from_address(address).value == value
        copying = [each for each in copying if each[0] > number]
        for passed in device.fences[: min((each[3] for each in copying), default=None)]:
            passed[0] = True
        most = max(most, len(device.pinned))
    # THEN memory is used again, nothing was unmapped meanwhile, and all is left to the sweeping
    assert most < 60
    gc.collect()
    assert device.pinned == set()
    assert len(device.gone) == most
    for unmap in device.gone:
        unmap()


def test_a_device_far_behind_is_waited_for(device: Device) -> None:
    device.ends_waits = True  # GIVEN one that passes nothing before
    most = max(len(device.pinned) for _ in large(100))
    assert device.waits
    assert most < 60
    gc.collect()
    for unmap in device.gone:
        unmap()


def test_two_pinning_threads_are_resized_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_pinning(monkeypatch)
    how = {"batch_size": 4, "num_workers": 2, "pin_memory": True}
    loaders, rng = [FixedLoader(Numbers(200), **how) for _ in range(2)], random.Random(0)
    for number, (a, b) in enumerate(zip(*loaders, strict=True)):
        assert a.tolist() == b.tolist()
        assert a[0, 0] == 4 * number
        rng.choice(loaders).change_to(rng.choice([TWO, THREE, FOUR]))


@pytest.mark.gpu
@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("pins", [False, True])
def test_batches_are_whole_on_the_gpu(pins: bool, is_beside: bool) -> None:
    # GIVEN batches of 8 MiB, larger than what the driver stages at once
    rows, beside = Made(lambda n: torch.full((1 << 18,), float(n)), 800), torch.cuda.Stream()
    loader = FixedLoader(rows, batch_size=8, num_workers=4, pin_memory=pins)
    rng, seen = random.Random(0), list[Any]()
    for number, batch in enumerate(loader):
        assert batch.is_pinned() is pins
        # WHEN each copy waits behind a kernel, and the batch is dropped at once
        with torch.cuda.stream(beside if is_beside else torch.cuda.current_stream()):
            torch.cuda._sleep(4_000_000)
            on_device = batch.to("cuda", non_blocking=True)
        del batch
        torch.cuda.current_stream().wait_stream(beside)
        seen.append(torch.stack(on_device.aminmax(dim=1), dim=1))
        on_device.record_stream(torch.cuda.current_stream())
        if number % 11 == 10:
            loader.change_to(rng.choice([TWO, THREE, FOUR]))
    assert torch.cat(seen).tolist() == [[float(index)] * 2 for index in range(800)]


def test_many_or_long_jobs_never_block_the_loop() -> None:
    how = {"num_workers": 2, "prefetch_factor": 1000, "tune": False}
    batches = iter(AutoLoader(Numbers(16_000), batch_size=8, **how))
    first = next(batches)
    time.sleep(0.3)  # workers fill their sockets
    seen = [first[0, 0].item(), *(batch[0, 0].item() for batch in batches)]
    assert seen == list(range(0, 16_000, 8))
    (batch,) = AutoLoader(Numbers(20_000), batch_size=20_000, num_workers=2)
    assert len(batch) == 20_000


NO_WORKER = [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 2, "worker .* is killed by signal: Killed"),
    (lambda: os._exit(3), 3, "exited unexpectedly with exit code 3"),
    (lambda: lambda: None, 2, "pickle|local object"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "workers", "says"), NO_WORKER)
def test_a_sample_no_worker_gives_is_torchs_error(make: Any, workers: int, says: str) -> None:
    rows, seen = Made(lambda index: make() if index == 7 else index, 20), list[Any]()
    with pytest.raises(Exception, match=says):  # noqa: PT012
        for batch in AutoLoader(rows, collate_fn=list, num_workers=workers):
            seen += batch
    assert seen == list(range(7))


def test_where_further_workers_fail_the_asked_stay() -> None:
    connections = multiprocessing.BoundedSemaphore(2)  # GIVEN a server that takes two connections
    mine: list[bool] = []

    def read(index: int) -> int:
        if not mine:
            mine.append(connections.acquire(block=False))
        if not mine[0]:
            raise ConnectionResetError("too many connections")
        time.sleep(0.002)
        return index

    loader, seen = FixedLoader(Made(read, 120), batch_size=2, num_workers=2), list[int]()
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 10:
            loader.change_to(FOUR)
    assert seen == list(range(120))
    assert loader.num_workers == loader.config.num_workers == 2


def test_a_loop_with_few_descriptors_ends_as_torchs() -> None:
    # GIVEN batches of twelve segments, and a loop that may open four more files
    rows = Made(lambda index: [torch.zeros(20_000) for _ in range(12)], 8)
    batches = iter(AutoLoader(rows, batch_size=None, num_workers=2, tune=False))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(each) for each in descriptors()}
    least = next(n for n in itertools.count(3) if n - len([each for each in used if each < n]) == 4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        with pytest.raises(RuntimeError, match=r"Too many open files.*ulimit -n"):
            list(batches)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_loaders_numbers_tell_the_samplers_lead() -> None:
    given = list[int]()
    drawn = (given.append(index) or index for index in range(90))  # type: ignore[func-returns-value]
    loader = FixedLoader(Slow(90, 0.001), batch_size=None, sampler=drawn, num_workers=2)
    for number, _ in enumerate(loader):
        time.sleep(0.02)  # GIVEN steps that take longer than batches; workers begin meanwhile
        if number in (10, 35):
            loader.change_to(FOUR if number == 10 else TWO)
        if number in (8, 30, 60):  # the smaller number's queues have drained
            ahead = loader.num_workers * (loader.prefetch_factor or 0)
            assert len(given) - 1 - number == ahead
            assert loader.num_workers == (4 if number == 30 else 2)


def test_data_that_ask_their_worker_keep_the_number() -> None:
    loader = AutoLoader(Where(24), batch_size=4, num_workers=2)
    assert {(who, of) for _, who, of in torch.cat(list(loader)).tolist()} == {(0, 2), (1, 2)}
    assert loader.kept.kind == "worker_info"


def test_each_worker_of_a_stream_has_its_share() -> None:
    loader = AutoLoader(Stream(60), batch_size=4, num_workers=3)
    list(loader)
    assert loader.kept.kind == "iterable"
    assert {row.worker for row in loader.log.rows} == {0, 1, 2}


def augmented(make: Any, rows: Any = None, **arguments: Any) -> list[Any]:
    torch.manual_seed(3)
    loader, seen = make(rows or Noise(48), batch_size=4, **arguments), []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if hasattr(loader, "change_to") and number in (3, 6):
            loader.change_to(FOUR if number == 3 else TWO)
    return seen


def own_seed(worker: int) -> None:
    random.seed(worker)
    os.environ["WORKER"] = str(worker)


def test_augmentations_belong_to_the_batch() -> None:
    seen = augmented(FixedLoader, num_workers=2)
    assert augmented(AutoLoader, num_workers=3, tune=False) == seen
    assert augmented(FixedLoader) == seen
    assert len({tuple(sample[1:]) for sample in seen}) == 48
    # WHERE the number stays THEN they are torch's
    asked: dict[str, Any] = {"num_workers": 2, "worker_init_fn": own_seed}
    assert augmented(AutoLoader, **asked) == augmented(DataLoader, **asked)


def test_torch_and_numpy_draw_different_words() -> None:
    # GIVEN that torch's generator and numpy's are one algorithm, which a seed of 32 bits begins
    def words(_: int) -> torch.Tensor:
        numpys = np.random.randint(0, 1 << 32, dtype=np.uint32) % (1 << 24)
        return torch.stack([torch.tensor(int(numpys)), torch.randint(1 << 24, ())])

    rows = augmented(AutoLoader, Made(words, 16), num_workers=2)
    assert not [numpys for numpys, torchs in rows if numpys == torchs]


def test_items_are_fetched_by_threads_at_once() -> None:
    def together(index: int) -> int:
        barrier.wait()
        return index

    def sees_the_dataset(_: int) -> None:
        info: Any = get_worker_info()
        assert type(info.dataset) is Made

    barrier = threading.Barrier(8, timeout=30)
    how: Any = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": 8}
    how |= {"fetch_threads": 8, "worker_init_fn": sees_the_dataset}
    loader = AutoLoader(Made(together, 32), **how)
    assert torch.cat(list(loader)).tolist() == list(range(32))


@pytest.mark.parametrize("kept", [False, True])
def test_leaving_loop_or_loader_leaves_no_worker(kept: bool) -> None:
    loader = AutoLoader(Slow(400), batch_size=2, num_workers=2, persistent_workers=kept)
    for _ in range(2):
        for _ in loader:
            break
        with contextlib.suppress(KeyError):
            for _ in loader:
                raise KeyError
        gc.collect()
        assert len(multiprocessing.active_children()) == (2 if kept else 0)
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def test_epochs_that_are_left_early_leak_nothing() -> None:
    rows, held = Made(lambda index: torch.zeros(40_000), 64), list[int]()
    loader = AutoLoader(rows, batch_size=2, num_workers=2)
    for epochs in (1, 8):
        for epoch in range(epochs):
            assert len(list(itertools.islice(loader, 1 + epoch % 4))) == 1 + epoch % 4
        gc.collect()
        held.append(len(descriptors()))
    assert held[0] == held[1]
    assert mapped() == 0


def test_a_fork_leaves_workers_to_its_parent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = AutoLoader(Slow(80), batch_size=2, num_workers=2, tune=False)
    held, seen = [iter(loader)], list[int]()
    workers = {each.pid for each in held[0]._workers}

    def forked() -> None:
        sys.unraisablehook = lambda error: os._exit(3)
        held.clear()  # GIVEN that it drops the iterator as its parent would
        gc.collect()
        assert [batch[0, 0] for batch in loader] == list(range(0, 80, 2))  # by workers of its own

    while (batch := next(held[0], None)) is not None:
        seen += batch[:, 0].tolist()
        if batch[0, 0] == 20:
            child = multiprocessing.get_context("fork").Process(target=forked)
            child.start()
            child.join(60)
            assert child.exitcode == 0
    assert seen == list(range(80))
    assert caplog.text == ""
    assert {each.pid for each in held[0]._workers} == workers


def test_the_profiler_sees_what_it_sees_of_dataloader() -> None:
    seen = []
    for make in (DataLoader, AutoLoader):
        for number, _ in enumerate(make(Numbers(800), batch_size=4)):
            if number == 150:
                profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profile.start()
        profile.stop()
        averages = [each for each in profile.key_averages() if "DataLoader" in each.key]
        seen.append([(each.key.split("#")[0], each.count) for each in averages])
    assert seen == [[("enumerate(DataLoader)", 50)]] * 2


def test_torchs_handler_of_children_is_not_set() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    batches: Any = iter(AutoLoader(Slow(40), batch_size=2, num_workers=2))
    next(batches)
    assert not batches._worker_pids_set
    assert signal.getsignal(signal.SIGCHLD) is before


SCRIPT = """
import pathlib, time
from autotune_loader import AutoLoader
from tests.support.schedules import Slow
if __name__ == "__main__":
    for number, batch in enumerate(AutoLoader(Slow(10_000), num_workers=2)):
        time.sleep(0.01)
        if number == 10:
            pathlib.Path("running").touch()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_end_job_and_workers(
    how: signal.Signals, preloaded: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir()
    environ = {"TMPDIR": str(tmp_path / "temporary")}
    job = preloaded.start("train.py", folder=tmp_path, environ=environ)
    until(lambda: (tmp_path / "running").exists())
    os.killpg(job.pid, how) if how == signal.SIGINT else os.kill(job.pid, how)
    job.wait(60)
    assert ("KeyboardInterrupt" in job.output) is (how == signal.SIGINT)
    until(lambda: not [each for each in psutil.pids() if group_of(each) == job.pid])
    assert not list((tmp_path / "temporary").iterdir())


def until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


class Sized(Slow):
    """Its size may be changed, and the loop's own look at it makes a handle."""

    size, handle = 1, None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.handle = self.handle or os.getpid()
        number = int(super().__getitem__(index)[0])
        return torch.tensor([number, self.size, self.handle == os.getpid()])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("is_nursery_killed", [False, True])
def test_later_workers_see_the_data_as_the_first(kept: bool, is_nursery_killed: bool) -> None:
    rows = Sized(120)
    loader = FixedLoader(rows, batch_size=2, num_workers=2, persistent_workers=kept)
    for epoch in range(2):
        seen, iterator = [], iter(loader)
        for number, batch in enumerate(iterator):
            seen += batch.tolist()
            if number == 4:
                rows.size = 2 + epoch
                assert rows[0][1] == 2 + epoch  # the training's own look
                if is_nursery_killed:  # a worker is forked from the training, then
                    os.kill(iterator._context._nursery.pid, signal.SIGKILL)
                    rows.size = 1 + (epoch and not kept)
                    rows.handle = None
                loader.change_to(FOUR)
        rows.size = 2 + epoch
        rows.handle = None
        assert [index for index, *_ in seen] == list(range(120))
        assert {size for _, size, _ in seen} == {1 if kept or not epoch else 2}
        assert all(is_own for *_, is_own in seen)
        loader.change_to(TWO)
        if is_nursery_killed:
            break


@pytest.mark.parametrize(
    ("may_start", "kept", "begins"), [(True, False, 4), (False, False, 2), (False, True, 4)]
)
def test_a_short_epoch_starts_workers_only_first(may_start: bool, kept: bool, begins: int) -> None:
    rows = Sized(40)
    how = {"persistent_workers": kept, "multiprocessing_context": "fork"}
    loader = FixedLoader(rows, batch_size=2, num_workers=2, **how)
    loader.found.tuner.may_start = lambda: may_start  # type: ignore[method-assign]
    for workers in (begins, 4):
        batches = iter(loader)
        seen = next(batches).tolist()
        rows.size = 2
        loader.change_to(FOUR)
        seen += (row for batch in batches for row in batch.tolist())
        rows.size = 1
        assert loader.num_workers == workers
        assert [row[:2] for row in seen] == [[index, 1] for index in range(40)]


def test_a_subclass_may_have_attributes_by_our_names() -> None:
    class Own(AutoLoader[Any]):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            self.config = self.log = self.best = self.result = self.found = "own"

    loader = Own(Numbers(8), batch_size=2, num_workers=2)
    assert len(list(loader)) == 4
    assert loader.config == "own"
    assert "so far" in loader.report()
    assert loader.metrics()["num_workers"] == 2
