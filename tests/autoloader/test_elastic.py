"""Torch's iterator made elastic: whatever is resized, kept, killed or left, each sample comes once and in order."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from autotune_loader import AutoLoader
from autotune_loader.autoloader import channel
from autotune_loader.autoloader import iterator as elastic
from autotune_loader.machine.elsewhere import descriptors
from autotune_loader.values import LoaderConfig
from tests.support.bursts import Made
from tests.support.schedules import (
    KINDS,
    FixedLoader,
    Noise,
    Numbers,
    Slow,
    Stream,
    Where,
    differences,
    draw_case,
)

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]
TWO, THREE, FOUR = (LoaderConfig(num_workers=number) for number in (2, 3, 4))


# 5064: an epoch is left early near its end, when a deeper queue has reached the sampler's end, where it draws once more.
@pytest.mark.parametrize(
    ("seed", "kind"), [*((seed, kind) for kind in KINDS for seed in (1000, 1001)), (5064, None)]
)
def test_a_random_schedule_changes_nothing_that_the_training_sees(
    seed: int, kind: str | None
) -> None:
    assert differences(draw_case(seed, kind)) == []


def one_twice(rows: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(rows)
    return x, y, y.detach()


@pytest.mark.parametrize("pins", [False, True])
def test_what_the_loop_keeps_or_changes_stays_and_memory_is_used_again_while_no_batch_is_late(
    pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pins:
        imitate_pinning(monkeypatch)
    data = Made(
        lambda index: (torch.full((40_000,), float(index)), torch.full((9_000,), index)), 240
    )
    loader = AutoLoader(data, 4, num_workers=2, tune=False, pin_memory=pins, collate_fn=one_twice)
    kept, files = [], set()
    for number, (x, _, y) in enumerate(loader):
        assert (
            x[:, 0].tolist() == y[:, 0].tolist() == [float(4 * number + each) for each in range(4)]
        )
        x += 1000  # the loop's own
        if number % 10 == 0:
            kept.append((number, y))
        time.sleep(0.005)  # GIVEN steps that take longer than batches
        maps = Path("/proc/self/maps").read_text()
        files.add(maps.count("/memfd:batch"))
    assert all(y[:, 7].tolist() == [4 * number + each for each in range(4)] for number, y in kept)
    assert max(files) < 2 * (2 * 2 * 2 + 2) + len(
        kept
    )  # of 60 batches, the few that are on their way, and those kept
    del kept, x, y, _
    gc.collect()
    assert "/memfd:batch" not in Path("/proc/self/maps").read_text()


def imitate_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's pinning thread, on a machine without an accelerator: pinning copies."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0, raising=False)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None, raising=False)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # torch 2.6
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())


class Device:
    """What the CUDA driver is to a loop: it copies from pinned memory later, and passes a fence when the test says so."""

    def __init__(self) -> None:
        self.pinned, self.gone, self.fences, self.waits = (
            set[int](),
            list[Any](),
            list[Any](),
            list[Any](),
        )
        self.captures = self.is_refusing = False

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
        if self.is_refusing:
            return None
        passed = [False]
        self.fences.append(passed)
        return SimpleNamespace(is_passed=lambda: passed[0], wait=lambda: self.waits.append(passed))


def test_a_segment_that_a_device_may_copy_from_is_not_written_again_before_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, rng = Device(), random.Random(0)
    monkeypatch.setattr(elastic, "pinner_for", lambda loader: device)
    monkeypatch.setattr(channel, "pin", lambda data: data)
    data = Made(
        lambda index: (torch.full((1 << 15,), float(index)), index), 400
    )  # batches of 512 KiB
    copying, most = list[Any](), 0
    for number, (x, y) in enumerate(
        AutoLoader(data, batch_size=4, num_workers=3, tune=False, pin_memory=True)
    ):
        assert x.data_ptr() in device.pinned
        assert y.tolist() == [4 * number + each for each in range(4)]
        # WHEN the loop drops each batch at once, and the device reads it up to ten batches later
        copying.append(
            (number + rng.randrange(10), x.data_ptr(), float(x[0, 0]), len(device.fences))
        )
        del x, y
        device.captures, device.is_refusing = number % 7 == 0, number % 5 == 0
        for _, address, value, _ in copying:
            assert ctypes.c_float.from_address(address).value == value
        copying = [each for each in copying if each[0] > number]
        for passed in device.fences[
            : min((each[3] for each in copying), default=len(device.fences))
        ]:
            passed[0] = True
        most = max(most, len(device.pinned))
    # THEN memory is used again all the same, nothing was unmapped meanwhile, and all of it is left to the sweeping
    assert most < 60
    gc.collect()
    assert device.pinned == set()
    assert len(device.gone) == most
    for unmap in device.gone:
        unmap()


def test_two_loaders_with_a_pinning_thread_each_are_resized_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imitate_pinning(monkeypatch)
    loaders = [
        FixedLoader(Numbers(400), batch_size=4, num_workers=2, pin_memory=True) for _ in range(2)
    ]
    rng = random.Random(0)
    for number, (a, b) in enumerate(zip(*loaders, strict=True)):
        assert a.tolist() == b.tolist()
        assert a[0, 0] == 4 * number
        rng.choice(loaders).change_to(rng.choice([TWO, THREE, FOUR]))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("pins", [False, True])
def test_batches_are_whole_on_the_gpu_although_their_memory_goes_back_before_they_are_read(
    pins: bool, is_beside: bool
) -> None:
    # GIVEN batches of 8 MiB, larger than what the driver stages at once, from workers that write into the same memory again
    data, beside = (
        Made(lambda index: torch.full((1 << 18,), float(index)), 800),
        torch.cuda.Stream(),
    )
    loader, rng, seen = (
        FixedLoader(data, batch_size=8, num_workers=4, pin_memory=pins),
        random.Random(0),
        list[Any](),
    )
    for number, batch in enumerate(loader):
        assert batch.is_pinned() is pins
        # WHEN each copy waits behind a kernel, on the stream of the steps or on one beside it, and the batch is dropped at once
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


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_is_pickled_once_for_all_workers_whatever_shares_memory_in_it(
    method: str,
) -> None:
    data = Counted()
    loader = FixedLoader(data, batch_size=2, num_workers=2, multiprocessing_context=method)
    begun, seen = time.monotonic(), []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 1:
            loader.change_to(THREE)
    assert seen == [[index, 7] for index in range(24)]
    assert data.pickled == 1
    assert data.shared.tolist() == [1.0] * 24  # workers write to memory that they share
    assert time.monotonic() - begun < 60


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.pickled, self.shared, self.large = 0, torch.zeros(24).share_memory_(), bytes(1 << 20)
        self.value = multiprocessing.get_context("spawn").Value("i", 7)

    def __getstate__(self) -> dict[str, Any]:
        self.pickled += 1
        return self.__dict__

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.shared[index] += 1
        return torch.tensor([index, self.value.value])


def test_jobs_never_block_the_loop_however_many_and_however_long() -> None:
    loader = AutoLoader(
        Numbers(40_000), batch_size=8, num_workers=2, prefetch_factor=1000, tune=False
    )
    batches = iter(loader)
    first = next(batches)
    time.sleep(0.5)  # workers fill their sockets
    assert [first[0, 0].item(), *(batch[0, 0].item() for batch in batches)] == list(
        range(0, 40_000, 8)
    )
    assert [
        len(batch) for batch in AutoLoader(Numbers(20_000), batch_size=20_000, num_workers=2)
    ] == [20_000]


# The loss falls into the waiting for a batch, into the step, or into an epoch of workers that are kept.
@pytest.mark.parametrize(
    ("kept", "step_s", "kills"), [(False, 0.0, [3, 9, 20]), (True, 0.01, [3, 20])]
)
def test_killed_workers_begin_anew_and_nothing_is_lost_or_doubled(
    kept: bool, step_s: float, kills: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    loader = FixedLoader(Slow(160), batch_size=4, num_workers=3, persistent_workers=kept)
    for _ in range(2):
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch[:, 0].tolist())
            if number in kills:
                os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            time.sleep(step_s)
        assert seen == [list(range(first, first + 4)) for first in range(0, 160, 4)]
    assert caplog.text.count("Its batches are fetched again") >= 2


@pytest.mark.parametrize(
    ("make", "workers", "raised", "says"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            2,
            RuntimeError,
            "worker .* is killed by signal: Killed",
        ),
        (lambda: os._exit(3), 3, RuntimeError, "exited unexpectedly with exit code 3"),
        (lambda: lambda: None, 2, Exception, "pickle|local object"),
    ],
)
def test_a_sample_that_no_worker_can_give_ends_with_torchs_error(
    make: Any, workers: int, raised: type[Exception], says: str
) -> None:
    seen: list[Any] = []
    with pytest.raises(raised, match=says):  # noqa: PT012
        data = Made(lambda index: make() if index == 7 else index, 20)
        for batch in AutoLoader(data, collate_fn=list, num_workers=workers):
            seen += batch
    assert seen == list(range(7))


def test_more_workers_than_were_asked_for_go_where_one_fails_and_its_batch_is_fetched_again() -> (
    None
):
    """As a server does that takes two connections."""
    connections = multiprocessing.BoundedSemaphore(2)
    mine: list[bool] = []

    def read(index: int) -> int:
        if not mine:
            mine.append(connections.acquire(block=False))
        if not mine[0]:
            raise ConnectionResetError("too many connections")
        time.sleep(0.002)
        return index

    loader, seen = FixedLoader(Made(read, 200), batch_size=2, num_workers=2), list[int]()
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 20:
            loader.change_to(FOUR)
    assert seen == list(range(200))
    assert loader.num_workers == loader.config.num_workers == 2


def test_the_loaders_own_numbers_tell_how_far_its_sampler_is_ahead_while_no_batch_is_late() -> None:
    given: list[int] = []

    drawn = (given.append(index) or index for index in range(120))  # type: ignore[func-returns-value]
    loader = FixedLoader(Slow(120, 0.001), batch_size=None, sampler=drawn, num_workers=2)
    for number, _ in enumerate(loader):
        time.sleep(0.02)  # GIVEN steps that take longer than batches; workers begin meanwhile
        if number in (10, 50):
            loader.change_to(FOUR if number == 10 else TWO)
        if number in (8, 30, 80):  # the smaller number's queues have drained
            ahead = loader.num_workers * (loader.prefetch_factor or 0)
            assert len(given) - 1 - number == ahead
            assert loader.num_workers == (4 if number == 30 else 2)


def test_where_the_dataset_asks_who_its_worker_is_the_number_stays() -> None:
    loader = AutoLoader(Where(24), batch_size=4, num_workers=2)
    assert {(who, of) for _, who, of in torch.cat(list(loader)).tolist()} == {(0, 2), (1, 2)}
    assert loader.kept.kind == "worker_info"


def test_each_worker_of_a_stream_has_its_share_and_the_number_stays() -> None:
    loader = AutoLoader(Stream(60), batch_size=4, num_workers=3)
    seen = [batch.tolist() for batch in loader]
    assert loader.kept.kind == "iterable"
    assert {row.worker for row in loader.log.rows} == {0, 1, 2}
    assert seen == [batch.tolist() for batch in DataLoader(Stream(60), batch_size=4, num_workers=3)]


def augmented(make: Any, **arguments: Any) -> list[Any]:
    torch.manual_seed(3)
    loader = make(Noise(48), batch_size=4, collate_fn=torch.stack, **arguments)
    seen = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if hasattr(loader, "change_to") and number in (3, 6):
            loader.change_to(FOUR if number == 3 else TWO)
    return seen


def own_seed(worker: int) -> None:
    random.seed(worker)
    os.environ["WORKER"] = str(worker)


def test_augmentations_belong_to_the_batch_and_where_the_number_stays_they_are_torchs() -> None:
    seen = [
        augmented(FixedLoader, num_workers=2),
        augmented(AutoLoader, num_workers=3, tune=False),
        augmented(FixedLoader),
    ]
    assert seen[0] == seen[1] == seen[2]
    assert len({tuple(sample[1:]) for sample in seen[0]}) == 48
    asked: dict[str, Any] = {"num_workers": 2, "worker_init_fn": own_seed}
    assert augmented(AutoLoader, **asked) == augmented(DataLoader, **asked)


def slowly(index: int) -> torch.Tensor:
    time.sleep(0.02)
    return torch.tensor(index)


def sees_the_dataset(_: int) -> None:
    info: Any = get_worker_info()
    assert type(info.dataset) is Made


def test_items_are_fetched_by_threads_where_that_was_asked_for() -> None:
    rates = []
    for threads in (None, 8):
        loader = AutoLoader(
            Made(slowly, 96),
            batch_size=8,
            num_workers=2,
            fetch_threads=threads,
            worker_init_fn=sees_the_dataset,
            tune=False,
        )
        batches, begun = iter(loader), time.monotonic()
        assert torch.cat(list(batches)).tolist() == list(range(96))
        rates.append(time.monotonic() - begun)
    assert rates[0] > 2 * rates[1]


@pytest.mark.parametrize("kept", [False, True])
def test_whoever_leaves_a_loop_or_the_loader_leaves_no_worker(kept: bool) -> None:
    loader = AutoLoader(Slow(400), batch_size=2, num_workers=2, persistent_workers=kept)
    for _ in range(3):
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
    loader = AutoLoader(Made(lambda index: torch.zeros(40_000), 64), batch_size=2, num_workers=2)
    assert len(list(itertools.islice(loader, 3))) == 3
    gc.collect()
    before = len(descriptors())
    for most in range(1, 20):
        assert len(list(itertools.islice(loader, 1 + most % 4))) == 1 + most % 4
    gc.collect()
    assert len(descriptors()) == before
    assert "/memfd:batch" not in Path("/proc/self/maps").read_text()


def test_a_fork_of_the_training_leaves_workers_and_channels_to_its_parent() -> None:
    loader, seen, child = AutoLoader(Slow(80), batch_size=2, num_workers=2), list[Any](), -1
    for number, batch in enumerate(loader):
        seen += batch[:, 0].tolist()
        if number == 10:
            child = os.fork()
            if not child:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen == list(range(80))


@pytest.mark.parametrize("workers", [None, 2])
def test_the_profiler_sees_what_it_sees_of_dataloader(workers: int | None) -> None:
    seen = []
    for make in (DataLoader, AutoLoader):
        loader = make(
            Numbers(800), batch_size=4, **({} if workers is None else {"num_workers": workers})
        )
        for number, _ in enumerate(loader):
            if number == 150:
                profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profile.start()
        profile.stop()
        averages = profile.key_averages()
        seen.append(
            [(each.key.split("#")[0], each.count) for each in averages if "DataLoader" in each.key]
        )
    assert seen == [[("enumerate(DataLoader)", 50)]] * 2


def test_no_worker_is_left_to_torchs_handler_of_children_nor_is_that_left_behind() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    batches: Any = iter(AutoLoader(Slow(40), batch_size=2, num_workers=2))
    next(batches)
    assert not batches._worker_pids_set
    assert signal.getsignal(signal.SIGCHLD) is before
    batches._shutdown_workers()


SCRIPT = """
import time, torch
from autotune_loader import AutoLoader
from tests.support.schedules import Slow
for number, batch in enumerate(AutoLoader(Slow(10_000), num_workers=2)):
    time.sleep(0.01)
    if number == 10:
        print("running", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_end_the_job_and_its_workers(how: signal.Signals, tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command, where = (
        [sys.executable, "-c", SCRIPT],
        {"cwd": REPOSITORY, "env": {**os.environ, "TMPDIR": str(tmp_path)}},
    )
    with subprocess.Popen(command, **where, **pipes, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "running\n"
            os.killpg(job.pid, how) if how == signal.SIGINT else os.kill(job.pid, how)
            _, told = job.communicate(timeout=30)
        finally:
            job.kill()
    assert ("KeyboardInterrupt" in told) is (how == signal.SIGINT)
    deadline = time.monotonic() + 15
    while [each for each in psutil.process_iter() if _group(each.pid) == job.pid]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


class Sized(Slow):
    """Its size may be changed, and the loop's own look at it makes a handle."""

    size, handle = 1, None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.handle is None:
            self.handle = os.getpid()
        return torch.tensor(
            [int(super().__getitem__(index)[0]), self.size, self.handle == os.getpid()]
        )


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("is_nursery_killed", [False, True])
def test_workers_that_begin_later_see_the_data_as_the_first_ones_did(
    kept: bool, is_nursery_killed: bool
) -> None:
    data = Sized(200)
    loader = FixedLoader(data, batch_size=2, num_workers=2, persistent_workers=kept)
    for epoch in range(2):
        seen, iterator = [], iter(loader)
        for number, batch in enumerate(iterator):
            seen += batch.tolist()
            if number == 4:
                data.size = 2 + epoch
                assert data[0][1] == 2 + epoch  # the training's own look
                if is_nursery_killed:
                    os.kill(iterator._context._nursery.pid, signal.SIGKILL)
                    data.size = 1 + (epoch and not kept)
                    data.handle = None
                loader.change_to(FOUR)
        data.size = 2 + epoch
        data.handle = None
        assert [index for index, *_ in seen] == list(range(200))
        assert {size for _, size, _ in seen} == {1 if kept or not epoch else 2}
        assert all(is_own for *_, is_own in seen)
        loader.change_to(TWO)
        if is_nursery_killed:
            break


@pytest.mark.parametrize(
    ("may_start", "kept", "begins"), [(True, False, 4), (False, False, 2), (False, True, 4)]
)
def test_an_epoch_too_short_for_trials_forks_workers_at_its_beginning_alone(
    may_start: bool, kept: bool, begins: int
) -> None:
    data = Sized(40)
    how = {"persistent_workers": kept, "multiprocessing_context": "fork"}
    loader = FixedLoader(data, batch_size=2, num_workers=2, **how)
    loader.found.tuner.may_start = lambda: may_start  # type: ignore[method-assign]
    for workers in (begins, 4):
        iterator = iter(loader)
        assert (iterator._context._nursery is not None) is (workers == 4)
        seen = next(iterator).tolist()
        data.size = 2
        loader.change_to(FOUR)
        seen += (row for batch in iterator for row in batch.tolist())
        data.size = 1
        assert loader.num_workers == workers
        assert [row[:2] for row in seen] == [[index, 1] for index in range(40)]


@pytest.mark.parametrize("pins", [False, True])
def test_a_worker_that_is_killed_while_there_are_more_than_were_asked_for(
    pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pins:
        imitate_pinning(monkeypatch)
    rng = random.Random(1)
    for _ in range(3):
        loader, seen = (
            FixedLoader(Slow(960, 0.0005), batch_size=4, num_workers=2, pin_memory=pins),
            list[int](),
        )
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            seen += batch[:, 0].tolist()
            if number == 5:
                loader.change_to(FOUR)
            if number == 25:
                os.kill(rng.choice(iterator._workers).pid, signal.SIGKILL)
        assert seen == list(range(960))
        assert len(iterator._workers) == loader.num_workers == 2


def test_a_subclass_may_have_attributes_of_its_own_by_our_names() -> None:
    class Own(AutoLoader[Any]):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            self.config, self.log, self.best, self.result, self.found = (
                {"lr": 1},
                print,
                0.9,
                None,
                [],
            )

    loader = Own(Numbers(8), batch_size=2, num_workers=2)
    assert len(list(loader)) == 4
    assert loader.config == {"lr": 1}
    assert "so far" in loader.report()
    assert loader.metrics()["num_workers"] == 2
