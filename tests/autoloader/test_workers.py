"""Real workers: whatever changes or is lost in between, the batches are those of a plain DataLoader, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, get_worker_info

from autotune_loader.autoloader.difference import difference
from autotune_loader.machine.elsewhere import descriptors
from autotune_loader.values import LoaderConfig
from tests.support.bursts import Made
from tests.support.schedules import KINDS, FixedLoader, Noise, Numbers, Slow, Where, differences, draw_case, states

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]
ALONE, TWO = LoaderConfig(), LoaderConfig(num_workers=2)
KEPT = LoaderConfig(num_workers=2, persistent_workers=True)
FOURS = [list(range(i, i + 4)) for i in range(0, 160, 4)]
Pair = namedtuple("Pair", ["x", "y"])


def indices(batches: Any) -> list[Any]:
    return [batch[..., 0].tolist() for batch in batches]


def changed(loader: Any, configs: list[LoaderConfig], every: int = 3) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number % every == every - 1 and configs:
            loader.change_to(configs.pop(0))
        yield batch


# 5064: an epoch is left early near its end, when a deeper queue has reached the sampler's end, where it draws once more.
@pytest.mark.parametrize(("seed", "kind"), [*((seed, kind) for kind in KINDS for seed in (1000, 1001)), (5064, None)])
def test_a_random_schedule_changes_nothing_that_the_training_sees(seed: int, kind: str | None) -> None:
    assert differences(draw_case(seed, kind)) == []


MESSAGES = [
    torch.arange(5), torch.tensor(3.5), torch.tensor([True, False]), torch.randn(3).half(), torch.randn(2).bfloat16(),
    torch.empty(0, 3), torch.randn(200, 300), torch.randn(200, 300).t(), torch.randn(3, 4).t(), torch.randn(300, 300)[10:200],
    torch.eye(3).to_sparse(), torch.eye(99).to_sparse(), torch.zeros(3, requires_grad=True), torch.randn(4, dtype=torch.cfloat),
    {"a": [np.zeros((300, 300)), np.arange(3)], "s": ["x" * 100] * 10, "n": None}, Pair(torch.ones(2), ("x", 1)), b"x" * 10**6,
    [torch.full((2,), number) for number in range(300)], [torch.full((20_000,), float(number)) for number in range(40)],
    [np.full(20_000, number) for number in range(600)], torch.nn.Parameter(torch.ones(30_000)), "x" * 100_000,
]  # fmt: skip


def test_worker_init_fn_runs_in_each_worker_which_knows_who_it_is() -> None:
    started = multiprocessing.Value("i", 0)

    def note(worker: int) -> None:
        info: Any = get_worker_info()
        assert (info.id, int(info.dataset[3][0])) == (worker, 3)
        with started.get_lock():
            started.value += 1

    loader = FixedLoader(Where(60), batch_size=2, num_workers=2, worker_init_fn=note)
    batches = torch.cat([*loader, *loader])
    assert {(who, of) for _, who, of in batches.tolist()} == {(0, 2), (1, 2)}
    assert started.value == 4  # as torch's, anew for each epoch
    assert {trace.worker for trace in loader.log.rows} == {0, 1}
    assert all(t.requested <= t.received <= t.step_end and t.fetch_start <= t.collate_end for t in loader.log.rows)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_batches_of_all_kinds_arrive_as_they_were_and_hold_no_descriptor() -> None:
    data = Made(lambda index: MESSAGES[index], len(MESSAGES))
    loader = FixedLoader(data, batch_size=None, collate_fn=lambda each: each, num_workers=2)
    held = set()
    for _ in range(3):
        for own, arrived in zip(MESSAGES, loader, strict=True):
            assert difference(own, arrived) is None
            if isinstance(arrived, torch.Tensor) and arrived is not own and arrived.layout is torch.strided:
                arrived.detach().zero_()  # it is the loop's own
        del arrived
        gc.collect()
        held.add(len(descriptors()))
    assert len(held) == 1


def drawn(seed: int, loader_of: Any, dataset: Any, *configs: LoaderConfig, **arguments: Any) -> Any:
    """Batches, what the loop itself draws beside them, and how the generators end."""
    torch.manual_seed(0)
    random.seed(seed)
    np.random.seed(seed)
    seen, own, left = list[Any](), list[Any](), list(configs)
    loader = loader_of(dataset, batch_size=4, shuffle=True, collate_fn=list, **arguments)
    for number, batch in enumerate(changed(loader, left)):
        seen += [sample.tolist() for sample in batch]
        # Some of these leave a second Gaussian number in a generator's hands.
        own.append((number % 3 and random.gauss(0, 1), number % 2 and np.random.normal(), torch.rand(()).item()))
    return seen, (own, states())


def test_augmentations_do_not_depend_on_the_workers_and_the_loops_own_draws_not_on_them() -> None:
    batches = []
    for number, configs in enumerate([(ALONE,), (TWO,), (TWO, ALONE, LoaderConfig(num_workers=3), TWO)]):
        seen, own = drawn(number, FixedLoader, Noise(40), *configs[1:], config=configs[0])
        assert own == drawn(number, DataLoader, Numbers(40))[1]
        batches.append(seen)
    assert batches[0] == batches[1] == batches[2]
    assert len({tuple(sample[1:]) for sample in batches[0]}) == 40


class Attributed(Numbers):
    shared = None

    def __init__(self) -> None:
        super().__init__(16)
        self.epoch, self.labels, self.tensor, self.known = 1, np.zeros(1000), torch.zeros(1000), dict[str, int]()
        self.paths, self.part = [f"{number}.jpg" for number in range(1000)], SimpleNamespace(scale=0.1 + 0.2)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: setattr(d, "epoch", 3),
        lambda d: d.__dict__.pop("epoch"),
        lambda d: d.labels.__setitem__(17, 5),
        lambda d: d.paths.__setitem__(17, "other"),
        lambda d: d.known.update(a=1),
        lambda d: setattr(d.part, "scale", 2.5),
        lambda d: d.tensor.add_(1),
        lambda d: setattr(type(d), "shared", object()),
    ],
)
def test_workers_begin_anew_after_whatever_has_changed_between_two_epochs(change: Any) -> None:
    data = Attributed()
    loader = FixedLoader(data, batch_size=2, num_workers=2)

    def epoch() -> set[int | None]:
        assert len(list(loader)) == 8
        return {process.pid for process in multiprocessing.active_children()}

    first = epoch()
    data.part.scale = 0.1 + 0.2  # another object, the same value
    assert epoch() == first
    change(data)
    assert epoch().isdisjoint(first)


# The loss falls into the waiting for a batch, into the step, or into a change.
@pytest.mark.parametrize(
    ("kept", "step_s", "changes", "kills"),
    [(False, 0.0, {}, {3: 1, 20: 1}), (True, 0.01, {}, {3: 1, 20: 1}), (False, 0.0, {5: TWO}, {6: 3})],
)
def test_killed_workers_are_replaced_and_nothing_is_lost_or_doubled(
    kept: bool, step_s: float, changes: dict[int, LoaderConfig], kills: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    loader = FixedLoader(Slow(160), batch_size=4, config=LoaderConfig(num_workers=3, persistent_workers=kept))
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch)
        time.sleep(step_s)
        if number in changes:
            loader.change_to(changes[number])
        for process in multiprocessing.active_children()[: kills.get(number, 0)]:
            os.kill(process.pid or 0, signal.SIGKILL)
        time.sleep(step_s)
    assert indices(seen) == FOURS
    assert caplog.text.count("another one takes its place") >= 2
    assert len(indices(loader)) == 40


def test_workers_that_are_added_get_as_much_to_do_as_the_first_ones() -> None:
    loader = FixedLoader(Slow(200, 0.01), batch_size=1, num_workers=2, prefetch_factor=4)
    for number, _ in enumerate(loader):
        if number == 20:
            loader.change_to(LoaderConfig(num_workers=8, prefetch_factor=2))
    latest = [row.worker for row in loader.log.rows[-120:-20]]
    assert max(map(latest.count, range(8))) <= 2 * min(map(latest.count, range(8)))


@pytest.mark.parametrize(
    ("make", "raised", "says"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RuntimeError, "worker .* is killed by signal: Killed"),
        (lambda: lambda: None, Exception, "pickle|local object"),
    ],
    ids=["kills each worker", "cannot be sent"],
)
def test_a_sample_that_no_worker_can_give_ends_with_torchs_error(make: Any, raised: type[Exception], says: str) -> None:
    data, seen = Made(lambda index: make() if index == 7 else index, 20), list[Any]()
    with pytest.raises(raised, match=says):  # noqa: PT012
        for batch in FixedLoader(data, collate_fn=list, num_workers=2):
            seen += batch
    assert seen == list(range(7))


@pytest.mark.parametrize("config", [TWO, KEPT])
def test_whoever_leaves_a_loop_and_the_loader_leaves_no_worker(config: LoaderConfig) -> None:
    loader = FixedLoader(Numbers(40), config=config)
    for _ in loader:
        break
    with contextlib.suppress(KeyError):
        for _ in loader:
            raise KeyError
    assert len(multiprocessing.active_children()) == 2  # they wait for the next epoch
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def test_what_is_left_of_many_epochs_that_are_left_early_fills_no_socket() -> None:
    loader = FixedLoader(Made(lambda index: bytes(10_000), 64), batch_size=2, collate_fn=list, num_workers=3)
    for _ in range(200):
        assert len(next(iter(loader))) == 2


def a_generator_that_loops_share(make: Any) -> list[Any]:
    shared, seen = torch.Generator().manual_seed(3), list[Any]()
    loader = make(Numbers(24), batch_size=4, shuffle=True, generator=shared)
    for most in (3, 9, 2):
        seen += indices(itertools.islice(loader, most))
        seen.append(torch.rand(1, generator=shared).item())
    return seen


def a_batch_sampler_that_grows(make: Any) -> list[Any]:
    sampler, seen = BatchSampler(SequentialSampler(range(40)), 2, False), list[Any]()
    for number, batch in enumerate(make(Numbers(40), batch_sampler=sampler)):
        seen += indices([batch])
        sampler.batch_size = 5 if number == 3 else sampler.batch_size
    return seen


def loaders_in_turn(make: Any) -> list[Any]:
    loaders = [make(Numbers(24), batch_size=4, shuffle=True) for _ in range(2)]
    return [indices(pair) for pair in zip(*loaders, strict=True)]


def a_sampler_that_raises(make: Any) -> list[Any]:
    seen, sampler = list[Any](), (index if index < 21 else int("no more") for index in range(40))
    with contextlib.suppress(ValueError):
        for batch in make(Numbers(40), batch_size=4, sampler=sampler):
            seen += indices([batch])
        seen.append("not raised")
    return seen


LOOPS = [a_generator_that_loops_share, a_batch_sampler_that_grows, loaders_in_turn, a_sampler_that_raises]


@pytest.mark.parametrize("loop", LOOPS)
def test_workers_that_nobody_asked_for_draw_what_the_loop_would_when_it_would(loop: Any) -> None:
    def with_workers(*args: Any, **arguments: Any) -> Any:
        loader = FixedLoader(*args, **arguments)
        loader.change_to(LoaderConfig(num_workers=3))
        return loader

    torch.manual_seed(0)
    plain = loop(DataLoader)
    torch.manual_seed(0)
    assert loop(with_workers) == plain


def test_workers_hold_no_pipe_that_somebody_waits_for() -> None:
    read_end, write_end = os.pipe()
    for number, _ in enumerate(changed(FixedLoader(Numbers(200), batch_size=2), [TWO])):
        if number == 20:
            os.close(write_end)
            assert select.select([read_end], [], [], 5)[0]
    os.close(read_end)


def test_workers_keep_a_queue_that_the_dataset_holds() -> None:
    data = Made(lambda index: data.queue.put(index) or index, 8)
    data.queue = multiprocessing.SimpleQueue()
    list(FixedLoader(data, batch_size=2, num_workers=2))
    assert sorted(data.queue.get() for _ in range(8)) == list(range(8))


def test_each_worker_has_positions_of_its_own_in_open_files(tmp_path: Path) -> None:
    def at_its_position(index: int) -> int:
        file.seek(8 * index)
        time.sleep(0.0005)
        return int.from_bytes(file.read(8), "little")

    np.arange(200, dtype=np.int64).tofile(tmp_path / "raw")
    with (tmp_path / "raw").open("rb", buffering=0) as file:  # forks share where it is read
        loader = FixedLoader(Made(at_its_position, 200), batch_size=4, num_workers=4)
        assert torch.cat(list(loader)).tolist() == list(range(200))


def test_a_fork_goes_on_by_itself_and_leaves_the_workers_to_its_parent(caplog: pytest.LogCaptureFixture) -> None:
    loader, seen, child = FixedLoader(Numbers(80), batch_size=2), list[Any](), -1
    for number, batch in enumerate(changed(loader, [TWO])):
        seen += indices([batch])
        if number == 10:
            child = os.fork()
    gc.collect()
    good = seen == [[index, index + 1] for index in range(0, 80, 2)] and not caplog.text
    if not child:
        os._exit(0 if good else 1)
    assert good
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_workers_in_the_midst_of_a_batch_make_no_noise_when_the_loop_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        loader = FixedLoader(Slow(400, 0.002), batch_size=2, num_workers=4, prefetch_factor=8)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        del batches, loader
        gc.collect()
    time.sleep(0.3)  # for what they would say
    assert capfd.readouterr().err == ""


SCRIPT = """
import time, torch
from tests.support.schedules import FixedLoader, Numbers
loader = FixedLoader(Numbers(10_000), num_workers=2)
for number, batch in enumerate(loader):
    time.sleep(0.01)
    if number == 10:
        print("running", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_end_the_job_and_its_workers(how: signal.Signals, tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command, where = [sys.executable, "-c", SCRIPT], {"cwd": REPOSITORY, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with subprocess.Popen(command, **where, **pipes, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "running\n"
            os.killpg(job.pid, how) if how == signal.SIGINT else os.kill(job.pid, how)
            _, told = job.communicate(timeout=20)
        finally:
            job.kill()
    assert ("KeyboardInterrupt" in told) is (how == signal.SIGINT)
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(job.pid, 0)
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not list(tmp_path.iterdir())
