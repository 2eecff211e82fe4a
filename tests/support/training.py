"""A simulated training: the real iterator and tuner, over a clock and over workers that take no time of ours."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from torch.utils.data import Dataset

from autotune_loader.autoloader import iterator as real
from autotune_loader.autoloader.channel import Come, WorkerGone
from autotune_loader.autoloader.loader import AutoLoader
from autotune_loader.autoloader.tuner import Room, Tuner
from autotune_loader.autoloader.worker import BEGUN, Flag
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
TAIL_ONE_IN = 32


@dataclass
class Training(Dataset[Any]):
    """One job on one machine, and its dataset; time passes only in `run`."""

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
    tail: float = 1.0  # One fetch in 32 takes so many times as long
    fit: Callable[[], int] = lambda: 1_000  # Workers that fit into memory
    now: float = BEGUN_S
    samples: int = 0
    started: int = 0
    most: int = 0
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        self._random, self.cpu_s = random.Random(self.seed), 0.0
        self._device = 0.0  # When the device has done all
        self._steps, self._opened = 0, set[int]()
        self._hiccup_at = BEGUN_S + 0.6 * self.hiccup_every_s
        self.log.marks = Passed(self)  # type: ignore[assignment]
        self.loader: Any = self._loader_with(LoaderConfig(), tune=False)
        self._batches: Any = iter(())

    @classmethod
    def drawn(cls, seed: int, **more: Any) -> Training:
        """A job of a kind that there is."""
        rng = random.Random(seed)
        drawn: dict[str, Any] = {
            "fetch_s": 10 ** rng.uniform(-3.5, -1.2),
            "cpu": rng.choice([0.05, 0.5, 1.0]),
            "step_s": 10 ** rng.uniform(-4, -1.5),
            "cores": rng.choice([2, 4, 8]),
            "transfer_s": 10 ** rng.uniform(-4, -3),
            "epoch_batches": rng.choice([20, 200, 100_000]),
        }
        return cls(seed=seed, **{**drawn, **more})

    def __len__(self) -> int:
        return self.epoch_batches * SAMPLES

    def __getitems__(self, indices: list[int]) -> list[int]:
        """What the loop fetches itself."""
        took = self.fetch_takes(self.now, -1, 1.0)
        self.now += took
        self.cpu_s += took * self.cpu
        return indices

    def _loader_with(self, config: LoaderConfig, **arguments: Any) -> AutoLoader[Any]:
        how = {
            "num_workers": config.num_workers,
            "prefetch_factor": config.prefetch_factor,
            **arguments,
        }
        loader = AutoLoader(self, batch_size=SAMPLES, collate_fn=list, **how)
        loader.check_worker_number_rationality = lambda: None  # type: ignore[method-assign]
        return loader

    def tuner(self, asked: LoaderConfig, **arguments: Any) -> Tuner:
        """From now on a tuner of these arguments decides, and nobody has asked for workers if these are none."""
        self.loader = self._loader_with(asked, num_workers=asked.num_workers or None)
        options = {
            "cores": self.cores,
            "epoch_batches": self.epoch_batches,
            "max_workers": 32,
            **arguments,
        }
        live = self.loader._live
        live.tuner = live.found.tuner = Tuner(self.log, asked, **options)
        live.found.log, live.is_torchs = self.log, False
        live.room = lambda workers: Room(self.fit(), 1_000)  # type: ignore[method-assign]
        self._batches = iter(())
        return live.tuner

    def fixed(self, config: LoaderConfig) -> Training:
        """The same job, begun anew, with a configuration that nobody changes."""
        other = replace(
            self, seed=self.seed + 1, now=BEGUN_S, samples=0, started=0, most=0, log=Log()
        )
        other.loader = other._loader_with(config, tune=False)
        return other

    def rate(self, config: LoaderConfig, seconds: float = 20.0) -> float:
        """Samples/s of a configuration that nobody changes."""
        return self.fixed(config).run(None, seconds)

    def run(self, tuner: Tuner | None, seconds: float) -> float:
        """Train for so long; samples/s."""
        return together([self], [tuner], seconds)

    def until(self, tuner: Tuner, samples: float) -> float:
        """Train so many samples; seconds."""
        begun = self.now
        for _ in range(int(samples / SAMPLES)):
            self.batch(tuner)
        return self.now - begun

    def batch(self, _: Tuner | None = None) -> list[int]:
        with self._simulated():
            try:
                batch: list[int] = next(self._batches)
            except StopIteration:
                self._batches = iter(self.loader)
                batch = next(self._batches)
        self.samples += SAMPLES
        self.most = max(self.most, self.loader.num_workers)
        self._step()
        return batch

    @property
    def passed(self) -> float:
        """When the device has done what it was given by now."""
        return max(self.now, self._device)

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        """The iterator has this clock and these workers."""
        before = real.time, real.Births, real.end_process
        clock = SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: self.cpu_s)
        real.time, real.Births, real.end_process = clock, self._births, lambda process: None  # type: ignore[assignment]
        try:
            yield
        finally:
            real.time, real.Births, real.end_process = before  # type: ignore[misc]

    def _births(
        self,
        _context: Any,
        setup: Any,
        _held: Any,
        _pinner: Any,
        _home: Any,
        *,
        nursery_first: bool,
        **_: Any,
    ) -> Workers:
        return Workers(self, is_asked=setup.asked > 0, is_prepared=nursery_first)

    def _step(self) -> None:
        step_s = self._noisy(self.step_s)
        self._steps += 1
        if self.sync_every:
            self._device = max(self._device, self.now) + step_s
            self.now += self.launch_s
            if self._steps % self.sync_every == 0:
                self.now = max(self.now, self._device)
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
        if self.tail != 1.0 and self._random.random() < 1 / TAIL_ONE_IN:
            seconds *= self.tail
        if self.open_s and worker not in self._opened:
            self._opened.add(worker)
            seconds += self.open_s
        if self.hiccup_every_s and now >= self._hiccup_at:
            self._hiccup_at += self.hiccup_every_s
            seconds += self.hiccup_s
        return seconds

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self.noise))


class Passed:
    """What a log takes for its marks: the device passes a moment when it has done what it was given by then."""

    def __init__(self, training: Training) -> None:
        self._training, self.looks, self.until = training, 0, 0

    def are_none(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def note(self, now: float, tell: Callable[..., object], *what: Any) -> None:
        tell(*what, max(now, self._training.passed))

    def settle(self, now: float, *, is_end: bool = False) -> None: ...


class Workers:
    """What the iterator takes for its births: processes, queues and results are here, and what they take is arithmetic."""

    method = "fork"

    def __init__(self, training: Training, *, is_asked: bool, is_prepared: bool) -> None:
        self.training, self._is_asked, self.results = training, is_asked, self
        self.is_prepared, self.start_s = is_prepared, 0.0
        self._messages: list[tuple[float, int, Any, Come]] = []
        self._numbers, self._is_first, self._count = itertools.count(), True, 0

    # --- births ---

    def Event(self) -> Flag:  # noqa: N802 - as in multiprocessing
        return Flag()

    def Queue(self) -> Any:  # noqa: N802
        if self._is_first:
            self._is_first = False
            return self
        self._made, self._count = Worker(self, self._count), self._count + 1
        return self._made

    def Process(self, *, target: Any, args: Any) -> Any:  # noqa: N802
        return (
            self._made
            if self._is_asked
            else SimpleNamespace(start=lambda: None, pid=0, daemon=True)
        )

    def start(self, number: int, _count: int) -> tuple[Worker, Worker]:
        worker: Worker = self.Queue()
        worker.number = number
        worker.start()
        return worker, worker

    def prepare(self, _files: Any = ()) -> None:
        self.is_prepared = True

    def started(self) -> None: ...

    def close_nursery(self) -> None: ...

    # --- results ---

    def tell(self, at: float, number: Any, come: Come) -> None:
        heapq.heappush(self._messages, (at, next(self._numbers), number, come))

    def is_ready(self) -> bool:
        return bool(self._messages) and self._messages[0][0] <= self.training.now

    def get(self, timeout: float) -> tuple[Any, Come]:
        training = self.training
        if not self._messages or self._messages[0][0] > training.now + timeout:
            training.now += timeout
            raise queue.Empty
        at, _, number, come = heapq.heappop(self._messages)
        training.now = max(training.now, at)
        if come.fetch is not None:
            training.now += training.transfer_s
        return number, come

    def cancel_join_thread(self) -> None: ...

    def close(self) -> None: ...


class Worker:
    """A process and its channel."""

    pid, exitcode, daemon = 0, None, True

    def __init__(self, workers: Workers, number: int) -> None:
        self._workers, self.number, self._is_alive, self._free = workers, number, True, 0.0
        self.mapped, self.jobs = SimpleNamespace(all={}), deque[int]()

    def start(self) -> None:
        training = self._workers.training
        training.now += training.start_s
        training.started += 1
        self._workers.start_s = training.start_s
        self._free = training.now + BIRTH_S
        self._workers.tell(self._free, None, Come(None, None, None, BEGUN, self))  # type: ignore[arg-type]

    def put(self, job: Any) -> None:
        if job is None or not self._is_alive:
            return
        number, indices, *_ = job
        training = self._workers.training
        # So many compute at once that all cores are taken: in a steady state the others wait meanwhile.
        busy = training.loader.num_workers
        slower = max(1.0, busy / training.cores - (1 - training.cpu) / training.cpu)
        begun = max(self._free, training.now)
        end = self._free = begun + training.fetch_takes(begun, self.number, slower)
        fetch = self.number, begun, end, end, training.fetch_s * training.cpu
        self._workers.tell(end, number, Come(number, indices, fetch, None, self))  # type: ignore[arg-type]

    def kill(self) -> None:
        """It is gone with what it had to do."""
        gone = Come(None, WorkerGone(), None, None, self)  # type: ignore[arg-type]
        messages = self._workers._messages
        messages[:] = [
            each
            for each in messages
            if each[3].channel is not self or each[0] <= self._workers.training.now
        ]
        heapq.heapify(messages)
        self._is_alive = False
        self._workers.tell(self._workers.training.now, None, gone)

    def hang_up(self) -> None:
        self._is_alive = False

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self, timeout: float = 0.0) -> None: ...

    terminate = close = cancel_join_thread = join


def together(ranks: Sequence[Training], tuners: Sequence[Tuner | None], seconds: float) -> float:
    """Train for so long with steps that end together, as ranks do that reduce their gradients; samples/s of each."""
    first = ranks[0]
    begun, before = first.now, first.samples
    while first.now - begun < seconds:
        for rank, tuner in zip(ranks, tuners, strict=True):
            rank.batch(tuner)
        now = max(rank.now for rank in ranks)
        for rank in ranks:
            rank.now = now
    return (first.samples - before) / (first.now - begun)
