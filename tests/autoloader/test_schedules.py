"""A loader to which anything happens, beside a plain one, which says what each batch has to be."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from torch.utils import data
from torch.utils.data import DataLoader

from autotune_loader.autoloader.iterator import MOST_LOSSES
from autotune_loader.values import LoaderConfig
from tests.support.schedules import Fetched, FixedLoader, Numbers, Stream, states

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

KINDS = ("map", "getitems", "batch_sampler", "unbatched", "stream")


class Eager(Numbers):
    """A sampler that draws from the global generators once it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.samples).tolist()
        random.shuffle(order)
        return iter([order[i] for i in np.random.permutation(self.samples)])


# By name: a sampler of so many samples, which may have a generator of the script's own.
SAMPLERS: dict[str, Callable[[int, torch.Generator], Any]] = {
    "none": lambda n, own: data.SequentialSampler(range(n)),
    "shuffle": lambda n, own: data.RandomSampler(range(n)),
    "random": lambda n, own: data.RandomSampler(range(n), num_samples=2 * n),
    "subset": lambda n, own: data.SubsetRandomSampler(range(0, n, 2)),
    "weighted": lambda n, own: data.WeightedRandomSampler(range(1, n + 1), n),
    "distributed": lambda n, own: data.DistributedSampler(Numbers(n), 2, n % 2),
    "eager": lambda n, own: Eager(n),
    "own": lambda n, own: data.RandomSampler(range(n), generator=own),
    "own, again": lambda n, own: data.RandomSampler(range(n), True, generator=own),
}  # fmt: skip
GENERATORS = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


@dataclass(frozen=True)
class Case:
    """The arguments of a loader."""

    kind: str
    sampler: str
    samples: int
    batch_size: int
    workers: dict[str, Any]
    drops: bool
    draws: bool  # Whether the loop draws random numbers, too, as dropout does

    def arguments(self) -> dict[str, Any]:
        """Fresh ones, samplers and generators included."""
        own = torch.Generator().manual_seed(self.samples)
        sampler = SAMPLERS[self.sampler](self.samples, own)
        asked: dict[str, Any] = {"dataset": Numbers(self.samples), **self.workers}
        if self.kind == "stream":
            return asked | {"dataset": Stream(self.samples), "batch_size": self.batch_size}
        if self.kind == "getitems":
            asked["dataset"] = Fetched(self.samples)
        if self.sampler.startswith("own"):
            asked["generator"] = own
        if self.kind == "batch_sampler":
            return asked | {
                "batch_sampler": data.BatchSampler(sampler, self.batch_size, self.drops)
            }
        if self.kind == "unbatched":
            return asked | {"batch_size": None, "sampler": sampler}
        asked |= {"batch_size": self.batch_size, "drop_last": self.drops}
        how = {"none": False, "shuffle": True, "own": True}
        return asked | (
            {"shuffle": how[self.sampler]} if self.sampler in how else {"sampler": sampler}
        )


ASKED = st.fixed_dictionaries(
    {
        "num_workers": st.integers(1, 3),
        "prefetch_factor": st.integers(1, 3),
        "persistent_workers": st.booleans(),
    }
)
CASES = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    sampler=st.sampled_from(list(SAMPLERS)),
    samples=st.integers(1, 90),
    batch_size=st.integers(1, 7),
    workers=st.just({}) | ASKED,
    drops=st.booleans(),
    draws=st.booleans(),
)
BATCHES = st.integers(1, 12)


class Side:
    """One of two loaders, with the global generators as its own training has them."""

    def __init__(self, case: Case, loader_class: type[Any]) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(case.samples)
        self.arguments, self.draws, self.iterator = case.arguments(), case.draws, None
        self.__exit__()
        with self:
            self.loader = loader_class(**self.arguments)

    def __enter__(self) -> None:
        for (_, put_back), state in zip(GENERATORS, self.global_states, strict=True):
            put_back(state)

    def __exit__(self, *_: object) -> None:
        self.global_states: list[Any] = [state() for state, _ in GENERATORS]

    @property
    def states(self) -> Any:
        with self:
            return states(self.arguments.get("generator"))

    def begin(self, epoch: int) -> None:
        with self:
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            self.iterator = iter(self.loader)

    def take(self) -> Any:
        """The next batch, and what the loop draws then; None at the end."""
        with self:
            if (batch := next(self.iterator, None)) is None:
                self.iterator = None
                return None
            seen = [torch.as_tensor(batch).tolist()]
            if self.draws:
                seen += [torch.rand(1).item(), random.random(), np.random.random()]
            return seen


class Schedule(RuleBasedStateMachine):
    """What may happen to a loader, in any order."""

    running = precondition(lambda self: self.ours.iterator is not None)
    between = precondition(lambda self: self.ours.iterator is None)

    @initialize(case=CASES)
    def make(self, case: Case) -> None:
        self.case, self.plain, self.ours = case, Side(case, DataLoader), Side(case, FixedLoader)
        self.epoch = self.kills = 0
        self.is_equal = True
        self.next_epoch(of_a_copy=False)

    @between
    @rule(of_a_copy=st.booleans())
    def next_epoch(self, of_a_copy: bool) -> None:
        self.epoch += 1
        for side in (self.plain, self.ours):
            # Neither a generator nor workers that are kept can be pickled.
            is_shared = self.case.sampler.startswith("own") or side.loader.persistent_workers
            if of_a_copy and is_shared:
                side.loader = copy.copy(side.loader)
            elif of_a_copy:
                side.loader = pickle.loads(pickle.dumps(side.loader))
            side.begin(self.epoch)

    @rule(workers=st.integers(0, 4), depth=st.integers(1, 4), batches=BATCHES)
    def resize(self, workers: int, depth: int, batches: int) -> None:
        config = LoaderConfig().with_workers(workers, depth if workers else None)
        self.ours.loader.change_to(config)
        self.take(batches)

    @running
    @rule(batches=BATCHES)
    def pause(self, batches: int) -> None:
        time.sleep(0.02)  # workers begin meanwhile
        self.take(batches)

    @running
    @precondition(lambda self: self.case.kind != "stream" and self.kills < MOST_LOSSES - 1)
    @rule(number=st.integers(0, 4), batches=BATCHES)
    def kill(self, number: int, batches: int) -> None:
        """A worker, or what forks further ones; the third in a row would be torch's error."""
        iterator: Any = self.ours.iterator
        processes = [*iterator._workers, iterator._context._nursery]
        if pid := getattr(processes[number % len(processes)], "pid", None):
            self.kills += 1
            os.kill(pid, signal.SIGKILL)
        self.take(batches)

    @running
    @rule(batches=BATCHES)
    def fork(self, batches: int) -> None:
        """A process of the training's own, which drops the iterator that it has inherited."""
        if (pid := os.fork()) == 0:
            with suppress(BaseException):
                getattr(self.ours.iterator, "__del__", int)()  # a stream without workers has none
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        self.take(batches)

    @running
    @rule()
    def leave(self) -> None:
        """As by `break`."""
        for side in (self.plain, self.ours):
            side.iterator = None
            if self.case.sampler == "own, again" and "generator" in side.arguments:
                # It has drawn as far ahead as there are workers, in torch as here.
                side.arguments["generator"].manual_seed(self.epoch)

    def take(self, batches: int = 1000) -> None:
        """So many batches, or fewer at the end of the epoch."""
        for _ in range(batches if self.ours.iterator is not None else 0):
            plain, ours = self.plain.take(), self.ours.take()
            self.is_equal = ours == plain
            assert ours == plain
            if plain is None:
                self.is_equal = self.ours.states == self.plain.states
                assert self.is_equal, "the states of the generators"
                return

    def teardown(self) -> None:
        if not hasattr(self, "case"):  # hypothesis has drawn none
            return
        if self.is_equal:
            self.take()
        for side in (self.plain, self.ours):  # nothing for the garbage collector, as of forks
            side.iterator = side.loader = None


def run_schedules(examples: int, **options: Any) -> None:
    options |= {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    options["phases"] = [Phase.generate]  # to shrink them takes minutes
    how = settings(max_examples=examples, stateful_step_count=12, **options)
    run_machine(Schedule, settings=how)


def test_no_schedule_changes_what_the_training_sees() -> None:
    run_schedules(12, derandomize=True)  # more of them: test_at_length.py


# Near its end a deeper queue has reached the sampler's end, where it draws once more.
def test_a_break_leaves_the_samplers_generator_as_torch() -> None:
    asked = {"num_workers": 1, "prefetch_factor": 3}
    schedule = Schedule()
    schedule.make(Case("unbatched", "own", 16, 6, asked, drops=False, draws=True))
    schedule.take(11)
    schedule.resize(workers=2, depth=4, batches=1)
    schedule.leave()
    schedule.next_epoch(of_a_copy=False)
    schedule.teardown()


def test_a_sampler_is_asked_once_without_workers() -> None:
    schedule = Schedule()
    schedule.make(Case("unbatched", "eager", 16, 1, {}, drops=False, draws=False))
    schedule.teardown()
