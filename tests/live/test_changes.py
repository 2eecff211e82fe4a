"""Real workers: whatever changes or is lost in between, the batches are those of a plain DataLoader."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from autotune_loader import AutoLoader as TunedLoader
from autotune_loader.live.trust import TRUSTED
from autotune_loader.machine.sandbox import channels, cut
from autotune_loader.values.config import LoaderConfig
from tests.support.schedules import KINDS, Noise, Numbers, Slow, Stream, Where, differences, draw_case
from tests.support.schedules import FixedLoader as AutoLoader

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]

TWO = LoaderConfig(num_workers=2)
KEPT = LoaderConfig(num_workers=2, persistent_workers=True)
FOURS = [list(range(i, i + 4)) for i in range(0, 160, 4)]


def indices(batches: Any) -> list[Any]:
    return [batch[..., 0].tolist() for batch in batches]


def changed(loader: AutoLoader[Any], configs: list[LoaderConfig], every: int = 3) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number % every == every - 1 and configs:
            loader.change_to(configs.pop(0))
        yield batch


# 5064: an epoch is left early near its end, when a deeper pool has reached the sampler's end, where it draws once more.
@pytest.mark.parametrize(("seed", "kind"), [*((seed, kind) for kind in KINDS for seed in (1000, 1001)), (5064, None)])
def test_a_random_schedule_changes_nothing_that_the_training_sees(seed: int, kind: str | None) -> None:
    assert differences(draw_case(seed, kind)) == []


def test_augmentations_do_not_depend_on_the_workers() -> None:
    runs = []
    for start, configs in ((LoaderConfig(), []), (TWO, []), (TWO, [LoaderConfig(), LoaderConfig(num_workers=3), TWO])):
        torch.manual_seed(0)
        loader = AutoLoader(Noise(40), batch_size=4, shuffle=True, config=start)
        runs.append([batch.tolist() for batch in changed(loader, configs)])

    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(sample[1:]) for batch in runs[0] for sample in batch}) == 40


def test_torchs_seeds_are_to_be_had() -> None:
    torch.manual_seed(0)
    plain = [batch.tolist() for batch in DataLoader(Noise(12), batch_size=2, num_workers=2)]
    torch.manual_seed(0)

    assert [b.tolist() for b in AutoLoader(Noise(12), batch_size=2, num_workers=2, worker_seeds="torch")] == plain


def test_each_pool_has_workers_of_its_own_which_worker_init_fn_begins() -> None:
    started = multiprocessing.Value("i", 0)

    def note(worker: int) -> None:
        info: Any = get_worker_info()
        assert (info.id, int(info.dataset[3][0])) == (worker, 3)
        with started.get_lock():
            started.value += 1

    loader = AutoLoader(Where(60), batch_size=2, config=TWO, worker_init_fn=note)
    batches = torch.cat(list(changed(loader, [LoaderConfig(num_workers=3), LoaderConfig()], every=6)))

    pools = {workers: set(batches[batches[:, 2] == workers][:, 1].tolist()) for workers in (2, 3, 0)}
    assert pools == {2: {0, 1}, 3: {0, 1, 2}, 0: {-1}}
    assert started.value == 5
    start, change, _ = loader.traces.changes
    assert (start.reason, start.batch, change.reason, change.batch) == ("start", 0, "change", 6)
    assert change.blocked_s > 0
    traces = loader.traces.block(0)
    assert {trace.worker for trace in traces} == {-1, 0, 1, 2}
    assert all(t.requested <= t.received <= t.step_end and t.fetch_start <= t.collate_end for t in traces)


class Fetching(Noise):
    """Notes what this process fetches."""

    fetched: list[int] = []  # noqa: RUF012 - shared on purpose

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize(("then", "now"), [(0, 2), (2, 0), (2, 3)])
def test_an_epoch_is_resumed_with_any_number_of_workers_and_nothing_is_fetched_again(then: int, now: int) -> None:
    def loader(workers: int) -> AutoLoader[Any]:
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 40, 40)
        return AutoLoader(Fetching(40), batch_size=4, sampler=sampler, config=LoaderConfig(num_workers=workers))

    torch.manual_seed(0)
    first = loader(then)
    iterator = iter(first)
    for _ in range(4):
        next(iterator)
    state, random_state = first.state_dict(), torch.get_rng_state()
    rest, after = ([batch.tolist() for batch in batches] for batches in (iterator, first))

    torch.manual_seed(99)
    second = loader(now)
    second.load_state_dict(state)
    torch.set_rng_state(random_state)
    Fetching.fetched.clear()

    assert len(rest) == 6
    assert [batch.tolist() for batch in second] == rest
    assert len(Fetching.fetched) == (0 if now else 24)
    assert [batch.tolist() for batch in second] == after


def test_out_of_order_nothing_is_lost_by_changes_or_resume() -> None:
    def loader() -> AutoLoader[Any]:
        return AutoLoader(Slow(60), batch_size=2, num_workers=3, in_order=False)

    first, seen, state = loader(), [], {}
    for number, batch in enumerate(first):
        seen.append(batch)
        if number == 5:
            first.change_to(TWO)
        if number == 12:
            state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    whole = [[i, i + 1] for i in range(0, 60, 2)]

    assert sorted(indices(seen)) == whole
    assert sorted([*indices(seen[:13]), *indices(second)]) == whole


def test_a_stream_changes_between_epochs_and_is_resumed_with_as_many_workers() -> None:
    first = AutoLoader(Stream(24), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in changed(first, [TWO])] == [[i, i + 1] for i in range(0, 24, 2)]
    iterator = iter(first)
    assert sorted(next(iterator).tolist() for _ in range(4))[:2] == [[0, 2], [1, 3]]
    state = first.state_dict()

    second = AutoLoader(Stream(24), batch_size=2, num_workers=2)
    second.load_state_dict(state)

    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in iterator]
    with pytest.raises(ValueError, match="num_workers=2 would work"):
        AutoLoader(Stream(24), batch_size=2, num_workers=1).load_state_dict(state)


# The loss falls into the waiting for a batch, into the step, or into a change, while two pools live.
@pytest.mark.parametrize(
    ("kept", "step_s", "changes", "kills"),
    [(False, 0.0, {}, {3: 1, 20: 1}), (True, 0.01, {}, {3: 1, 20: 1}), (False, 0.0, {5: TWO}, {6: 3})],
)
def test_killed_workers_are_replaced_and_nothing_is_lost_or_doubled(
    kept: bool, step_s: float, changes: dict[int, LoaderConfig], kills: dict[int, int]
) -> None:
    loader = AutoLoader(Slow(160), batch_size=4, config=LoaderConfig(num_workers=3, persistent_workers=kept))
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
    assert loader.losses == 2 or changes
    assert loader.config.num_workers == 1  # halved, as after memory ran out
    assert len(indices(loader)) == 40
    del loader, seen


class Deadly(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


# Torch raises where its signal handler happens to run: what it was opening at that moment is never closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sample_that_always_kills_its_worker_ends_with_torchs_error_at_its_batch() -> None:
    loader, seen = AutoLoader(Deadly(20), num_workers=2), []
    with pytest.raises(RuntimeError, match="DataLoader worker"):  # noqa: PT012 - what came before counts
        for batch in loader:
            seen.append(batch)

    assert indices(seen) == [[i] for i in range(7)]


def test_a_configuration_whose_worker_leaves_by_itself_is_given_up() -> None:
    class Leaving(Numbers):
        has_left = multiprocessing.Value("b", 0)

        def __getitem__(self, index: int) -> Any:
            if index == 20 and not self.has_left.value:
                self.has_left.value = 1
                sys.exit(3)
            return super().__getitem__(index)

    loader = TunedLoader(Leaving(40), batch_size=2, num_workers=1)
    loader._state.change_to(LoaderConfig(num_workers=2))

    assert indices(loader) == [[index, index + 1] for index in range(0, 40, 2)]
    assert loader.config == LoaderConfig(num_workers=1)


@pytest.mark.parametrize("config", [TWO, KEPT])
def test_whoever_leaves_a_loop_leaves_no_worker(config: LoaderConfig) -> None:
    loader = AutoLoader(Numbers(40), config=config)
    for _ in loader:
        break
    assert len(multiprocessing.active_children()) == (2 if config.persistent_workers else 0)
    with contextlib.suppress(KeyError):
        for _ in loader:
            raise KeyError
    assert len(multiprocessing.active_children()) == (2 if config.persistent_workers else 0)


def a_generator_that_loops_share(make: Any) -> list[Any]:
    shared, seen = torch.Generator().manual_seed(3), list[Any]()
    loader = make(Numbers(24), batch_size=4, shuffle=True, generator=shared)
    for most in (3, 9, 2):
        seen += indices(itertools.islice(loader, most))
        seen.append(torch.rand(1, generator=shared).item())
    return seen


def loaders_in_turn(make: Any) -> list[Any]:
    loaders = [make(Numbers(24), batch_size=4, shuffle=True) for _ in range(2)]
    return [indices(pair) for pair in zip(*loaders, strict=True)]


@pytest.mark.parametrize("loop", [a_generator_that_loops_share, loaders_in_turn])
def test_workers_that_nobody_asked_for_draw_what_the_loop_would_when_it_would(loop: Any) -> None:
    def with_workers(*args: Any, **arguments: Any) -> Any:
        loader = AutoLoader(*args, **arguments)
        loader.change_to(LoaderConfig(num_workers=3))
        return loader

    torch.manual_seed(0)
    plain = loop(DataLoader)
    torch.manual_seed(0)

    assert loop(with_workers) == plain


def test_workers_that_nobody_asked_for_hold_no_pipe_that_somebody_waits_for() -> None:
    read_end, write_end = os.pipe()
    for number, _ in enumerate(changed(AutoLoader(Numbers(200), batch_size=2), [TWO])):
        if number == 20:
            os.close(write_end)
            assert select.select([read_end], [], [], 5)[0]
    os.close(read_end)


def test_a_descriptor_that_has_become_another_pipe_is_not_cut() -> None:
    ends = os.pipe()
    noted = {number: what for number, what in channels().items() if number in ends}
    for end in ends:
        os.close(end)
    again = os.pipe()
    assert set(again) == set(noted)

    cut(noted)

    assert os.write(again[1], b"x") == len(os.read(again[0], 1))
    for end in again:
        os.close(end)


def test_a_fork_goes_on_by_itself_and_leaves_the_workers_to_its_parent() -> None:
    loader, seen, child = AutoLoader(Numbers(80), batch_size=2), list[Any](), -1
    for number, batch in enumerate(changed(loader, [TWO])):
        seen += indices([batch])
        if number == 10:
            child = os.fork()
    gc.collect()
    good = seen == [[index, index + 1] for index in range(0, 80, 2)] and loader.losses == 0
    if not child:
        os._exit(0 if good else 1)

    assert good
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Counting(Numbers):
    """Samples that cannot be read are rare."""

    def __getitem__(self, index: int) -> Any:
        if index == 150:
            self.bad.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("forks", [False, True])
def test_workers_that_nobody_asked_for_end_where_the_script_would_miss_or_find_something(forks: bool) -> None:
    data = Counting(160)
    data.bad = list[int]()
    loader, seen = TunedLoader(data, batch_size=4), list[Any]()
    for number, batch in enumerate(loader):
        seen += indices([batch])
        if not number:
            loader._trust.verdict, loader._state.wake = TRUSTED, math.inf
            loader._state.change_to(TWO)
        if number == 10:
            assert len(loader._state.tuned()._workers) == 2
            if forks and not (child := os.fork()):
                os._exit(0)
            if forks:
                assert loader._state.tuned()._workers == []  # which `os.wait()` would find
                assert os.waitpid(child, 0)[0] == child

    assert seen == FOURS
    assert data.bad == [150]
    assert loader._state.refusal.reason.startswith("the script forks" if forks else "fetching changes")


class Labelled(Numbers):
    label = 0

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.label])


def label_of_worker(worker: int) -> None:
    get_worker_info().dataset.label = 1 + worker


def test_a_loader_that_takes_the_place_of_another_is_not_trusted_as_that_one_was() -> None:
    for init in (None, label_of_worker):
        loader: Any = TunedLoader(Labelled(40), batch_size=2, worker_init_fn=init)
        for number, batch in enumerate(loader):
            assert int(batch[0, 1]) == 0
            if not number and init is None:
                loader._trust.verdict, loader._state.wake = TRUSTED, math.inf
                loader._state.change_to(TWO)


def test_kept_workers_stay_where_new_ones_would_see_another_dataset() -> None:
    data = Labelled(16)
    loader = TunedLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
    for label, workers in ((0, 2), (1, 3)):
        data.label = label
        loader._state.change_to(LoaderConfig(num_workers=workers, persistent_workers=True))
        assert {int(batch[0, 1]) for batch in loader} == {0}


SCRIPT = """
import time, torch
from tests.support.schedules import FixedLoader as AutoLoader, Numbers
loader = AutoLoader(Numbers(10_000), num_workers=2)
for number, batch in enumerate(loader):
    time.sleep(0.01)
    if number == 10:
        print("running", flush=True)
"""


def test_ctrl_c_ends_the_job_and_its_workers(tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command, where = [sys.executable, "-c", SCRIPT], {"cwd": REPOSITORY, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with subprocess.Popen(command, **where, **pipes, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "running\n"
            os.killpg(job.pid, signal.SIGINT)
            _, told = job.communicate(timeout=20)
        finally:
            job.kill()
    assert "KeyboardInterrupt" in told
    with pytest.raises(ProcessLookupError):
        os.killpg(job.pid, 0)
    assert not list(tmp_path.iterdir())
