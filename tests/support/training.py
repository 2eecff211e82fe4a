"""A simulated training: loader, iterator, births and tuner are real, over a clock of our own.

Not real are processes, what lies between them and the loop (channels, the nursery), and what the
system says of itself: cores and memory.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import queue
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

from torch.autograd import profiler
from torch.utils.data import Dataset

from autotune_loader.autoloader import births, iterator, live
from autotune_loader.autoloader.channel import Come, NoQueue, WorkerGone
from autotune_loader.autoloader.loader import AutoLoader
from autotune_loader.autoloader.tuner import Tuner
from autotune_loader.autoloader.worker import BEGUN
from autotune_loader.machine.limits import MemoryBudget
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import LoaderConfig

SAMPLES = 8
BEGUN_S = 100.0
"""When the clock begins."""
BIRTH_S = 0.005
"""From the start of a worker until it is ready."""
NEIGHBOUR_S, NEIGHBOUR_EVERY_S = 20.0, 70.0
"""How long a neighbour takes cores, and how often."""
DRIFT_S = 600.0
WORKER_BYTES = 1 << 27


@dataclass
class Training:
    """One job on one machine; time passes only in `run`."""

    fetch_s: float
    cpu: float  # Share of a fetch that computes
    step_s: float
    cores: int = 4
    transfer_s: float = 0.0002
    start_s: float = 0.01
    noise: float = 0.02
    epoch_batches: int = 1_000_000
    seed: int = 0
    open_s: float = 0.0  # How much longer the first fetch of each process takes
    evaluate_every: int = 0  # Steps; an evaluation takes
    evaluate_s: float = 20.0
    hiccup_every_s: float = 0.0  # One fetch takes longer by
    hiccup_s: float = 12.0
    sync_every: int = 0  # Steps; the device is asynchronous, and a step is launched in
    launch_s: float = 0.001
    drift: float = 1.0  # Fetches take so many times as long after ten minutes
    neighbour: float = 1.0  # Fetches take so many times as long while there is one
    free_bytes: int = 1 << 40  # Of memory, whoever runs
    memory_bytes: int = 1 << 40
    now: float = BEGUN_S
    samples: int = 0
    started: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self._random, self.cpu_s = random.Random(self.seed), 0.0
        self.device = 0.0  # When the device has done all
        self._steps, self._opened = 0, set[int]()
        self._hiccup_at = BEGUN_S + 0.6 * self.hiccup_every_s
        clock = SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: self.cpu_s)
        context = SimpleNamespace(get_start_method=lambda: "fork", Process=Worker.process)
        self._simulated: dict[ModuleType, dict[str, Any]] = {
            iterator: {
                "time": clock,
                "Births": lambda _, *given, **how: births.Births(context, *given, **how),
            },
            births: {
                "time": clock,
                "Channel": lambda _: Worker(self),
                "Results": functools.partial(Results, self),
                "Nursery": Nursery,
            },
            live: {
                "usable_cores": lambda: SimpleNamespace(usable=self.cores),
                "memory_budget": lambda: MemoryBudget(
                    available_bytes=self.free_bytes, total_bytes=self.memory_bytes, inputs=()
                ),
                "private_bytes": lambda _: WORKER_BYTES,
            },
            profiler: {"record_function": lambda _: contextlib.nullcontext()},  # a fifth of it all
        }
        """What takes the place of the real names in these modules while the training runs."""

    @classmethod
    def drawn(cls, seed: int) -> Training:
        """A job of a kind that there is."""
        rng = random.Random(seed)
        return cls(
            fetch_s=10 ** rng.uniform(-3.5, -1.2),
            cpu=rng.choice([0.05, 0.5, 1.0]),
            step_s=10 ** rng.uniform(-4, -1.5),
            cores=rng.choice([2, 4, 8]),
            transfer_s=10 ** rng.uniform(-4, -3),
            epoch_batches=rng.choice([20, 200, 100_000]),
            seed=seed,
        )

    def fetch(self) -> None:
        """The loop fetches a batch itself."""
        took_s = self.fetch_takes(self.now, -1, 1.0)
        self.now, self.cpu_s = self.now + took_s, self.cpu_s + took_s * self.cpu

    def _begin(self, config: LoaderConfig, **how: Any) -> None:
        how = {"num_workers": config.num_workers, "prefetch_factor": config.prefetch_factor, **how}
        self.loader: Any = AutoLoader(Samples(self), batch_size=SAMPLES, collate_fn=list, **how)
        self.loader.check_worker_number_rationality = lambda: None
        with self._is_simulated():
            self.log: Log = self.loader.log
        if self.sync_every:
            self.log.marks = Passed(self)  # type: ignore[assignment]
        self._batches: Any = iter(())

    def tuner(self, asked: LoaderConfig, *, max_workers: int = 32, **how: Any) -> Tuner:
        """From now on a tuner decides; nobody has asked for workers if `asked` has none."""
        workers = asked.num_workers or None
        self._begin(asked, num_workers=workers, max_workers=max_workers, **how)
        return self.loader.found.tuner

    def fixed(self, config: LoaderConfig) -> Training:
        """The same job, begun anew, with a configuration that nobody changes."""
        other = replace(self, seed=self.seed + 1, now=BEGUN_S, samples=0, started=0, most=0)
        other._begin(config, tune=False)
        return other

    def rate(self, config: LoaderConfig, seconds: float = 20.0) -> float:
        """Samples/s of a configuration that nobody changes."""
        return self.fixed(config).run(seconds)

    def run(self, seconds: float) -> float:
        """Train for so long; samples/s."""
        return together([self], seconds)

    def batch(self) -> list[int]:
        with self._is_simulated():
            try:
                batch: list[int] = next(self._batches)
            except StopIteration:
                self._batches = iter(self.loader)
                batch = next(self._batches)
        self.samples += SAMPLES
        self.most = max(self.most, self.loader.num_workers)
        self._step()
        return batch

    @contextlib.contextmanager
    def _is_simulated(self) -> Iterator[None]:
        """The loader has this clock, these workers and this machine."""
        real = [
            (module, {name: vars(module)[name] for name in names})
            for module, names in self._simulated.items()
        ]
        for module, names in self._simulated.items():
            vars(module).update(names)
        try:
            yield
        finally:
            for module, names in real:
                vars(module).update(names)

    def _step(self) -> None:
        step_s = self._noisy(self.step_s)
        self._steps += 1
        if self.sync_every:
            self.device = max(self.device, self.now) + step_s
            self.now += self.launch_s
            if self._steps % self.sync_every == 0:
                self.now = max(self.now, self.device)
        else:
            self.now += step_s
        if self.evaluate_every and self._steps % self.evaluate_every == 0:
            self.now += self.evaluate_s

    def fetch_takes(self, now: float, worker: int, slower: float) -> float:
        seconds = self._noisy(self.fetch_s * (1 - self.cpu + self.cpu * slower))
        if self.drift != 1.0:
            seconds *= self.drift ** ((now - BEGUN_S) / DRIFT_S)
        if self.neighbour != 1.0 and (now + 7 * self.seed) % NEIGHBOUR_EVERY_S < NEIGHBOUR_S:
            seconds *= self.neighbour
        if self.open_s and worker not in self._opened:
            self._opened.add(worker)
            seconds += self.open_s
        if self.hiccup_every_s and now >= self._hiccup_at:
            self._hiccup_at += self.hiccup_every_s
            seconds += self.hiccup_s
        return seconds

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self.noise))


class Samples(Dataset[Any]):
    """What the loop sees of a job: no generator, which it would seed for each batch."""

    def __init__(self, training: Training) -> None:
        self._training, self._batches = weakref.ref(training), training.epoch_batches

    def __len__(self) -> int:
        return self._batches * SAMPLES

    def __getitems__(self, indices: list[int]) -> list[int]:
        training = self._training()
        assert training is not None
        training.fetch()
        return indices


class Passed:
    """What a log takes for its marks: a device passes a moment once it has done what it has."""

    def __init__(self, training: Training) -> None:
        self._training, self.looks, self.until = training, 0, 0

    def are_none(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def note(self, now: float, tell: Callable[..., object], *what: Any) -> None:
        tell(*what, max(now, self._training.now, self._training.device))

    def settle(self, now: float, *, is_end: bool = False) -> None: ...


class Results(NoQueue):
    """What has come, and what will come when."""

    def __init__(self, training: Training, *, pins: bool) -> None:
        self._training, self._numbers = training, itertools.count()
        self.messages: list[tuple[float, int, Come]] = []

    def add(self, worker: Worker) -> None:
        worker.results = self

    def remove(self, worker: Worker) -> None: ...

    def tell(self, at: float, come: Come) -> None:
        heapq.heappush(self.messages, (at, next(self._numbers), come))

    def is_ready(self) -> bool:
        return bool(self.messages) and self.messages[0][0] <= self._training.now

    def get(self, timeout: float) -> tuple[Any, Come]:
        training = self._training
        if not self.messages or self.messages[0][0] > training.now + timeout:
            training.now += timeout
            raise queue.Empty
        at, _, come = heapq.heappop(self.messages)
        training.now = max(training.now, at)
        if come.fetch is not None:
            training.now += training.transfer_s
        return come.number, come


class Worker(NoQueue):
    """A process, and both ends of its channel."""

    number, pid = -1, 0
    results: Results

    def __init__(self, training: Training) -> None:
        self._training, self._is_alive, self._free = training, True, 0.0
        self.end = self.socket = self
        self.jobs = deque[int]()

    @staticmethod
    def process(*, args: Any, **_: Any) -> Worker:
        """That of the end of a channel which it is given."""
        _, _, worker, *_ = args
        return worker

    def start(self) -> None:
        training = self._training
        training.now += training.start_s
        training.started += 1
        self._free = training.now + BIRTH_S
        self.results.tell(self._free, Come(None, None, note=BEGUN, channel=self))

    def put(self, job: Any) -> None:
        if job is None or not self._is_alive:
            return
        number, indices, *_ = job
        training = self._training
        # So many compute at once that all cores are taken: the others wait meanwhile.
        busy = training.loader.num_workers
        slower = max(1.0, busy / training.cores - (1 - training.cpu) / training.cpu)
        begun = max(self._free, training.now)
        end = self._free = begun + training.fetch_takes(begun, self.number, slower)
        fetch = self.number, begun, end, end, training.fetch_s * training.cpu
        self.results.tell(end, Come(number, indices, fetch, channel=self))

    def kill(self) -> None:
        """It is gone with what it had to do."""
        now, messages = self._training.now, self.results.messages
        messages[:] = [each for each in messages if each[2].channel is not self or each[0] <= now]
        heapq.heapify(messages)
        self.hang_up()
        self.results.tell(now, Come(None, WorkerGone(), channel=self))

    def hang_up(self) -> None:
        self._is_alive = False

    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def exitcode(self) -> int | None:
        return None if self._is_alive else 0

    def join(self, timeout: float = 0.0) -> None: ...

    terminate = kill


class Nursery:
    """Whose clones are workers like others."""

    key, has_failed = None, False

    @classmethod
    def forked(cls, *_: Any) -> Nursery:
        return cls()

    def wait(self, _: float) -> bool:
        return True

    def close(self) -> None: ...

    popen = cloned = close


def together(ranks: Sequence[Training], seconds: float) -> float:
    """Train for so long; samples/s of each. Steps end together, as of ranks with gradients."""
    first = ranks[0]
    begun, before = first.now, first.samples
    while first.now - begun < seconds:
        for rank in ranks:
            rank.batch()
        now = max(rank.now for rank in ranks)
        for rank in ranks:
            rank.now = now
    refused = [rank.loader.found.tuner.refused for rank in ranks]
    assert not [each for each in refused if each is not None and each.kind == "not_tuned"], refused
    return (first.samples - before) / (first.now - begun)
