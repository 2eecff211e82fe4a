"""What only the case needs in which nobody asked for workers: the loop fetches, and workers take over once they are proven.

    the loop fetches ── it waits: two workers begin beside it ── four batches of theirs are the loop's own ── they take over

The loop never waits for a worker that has not answered: it fetches that batch itself. What its own first fetch made (a file, a
connection) workers begin without; files that are open are opened again there. Generators that the dataset holds are seeded for
each batch from their state at `iter()`, so that whoever sets them back gets the same samples.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.elastic import ElasticIter, View
from autotune_loader.autoloader.iterator import TunedIter
from autotune_loader.autoloader.worker import Seed, Seeds, drawn_from, mixed, states
from autotune_loader.diagnosis import Finding, Kept
from autotune_loader.machine.elsewhere import cut_channels, own_files
from autotune_loader.pipeline.workload import draws_nothing, is_users
from autotune_loader.values import MAIN_PROCESS, LoaderConfig

PROOF = 4
"""Batches of workers that have to be the loop's own."""
PATIENCE_S, PATIENCE_FETCHES = 10.0, 20.0
"""A worker that takes longer than both for a batch is killed."""
MOST_FOUND, MOST_ITEMS, MOST_DEPTH = 256, 64, 32
"""Objects that are looked through, items of one container that are; how deep a batch is compared."""
NEAR = 1e-5
"""Floats may differ by this, relative to the largest: other threads add up in another order."""
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, np.ndarray, torch.Tensor)
IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that are for the loop, such as Ctrl-C; others whose handlers are inherited end a worker that nobody asked for."""
MISSING: Any = object()


class Parts:
    """What dataset and collate function are made of, as far as it matters to workers.

    Attributes:
        generators: Of random numbers, without those that the loader or its sampler draws from.
        channels: Descriptors that the dataset holds.
        made: Attributes that the loop's first fetch has made, each with its owner and what it was before.
    """

    def __init__(self, loader: Any) -> None:
        self._roots = loader.dataset, loader.collate_fn
        orders = (loader, loader._index_sampler, getattr(loader._index_sampler, "sampler", None))
        self._orders = {id(getattr(each, "generator", None)) for each in orders}
        self.generators, self.made = list[Any](), list[tuple[dict[str, Any], str, Any]]()
        self.channels = list[int]()
        self._sizes = dict[str, Any]()
        self._members = [(own, dict(own)) for _, own in self._walk()]

    def _walk(self) -> list[tuple[type, dict[str, Any]]]:
        """Objects with attributes: their classes, and the attributes."""
        left, seen, found, self.generators = deque[Any](self._roots), set[int](), list[tuple[type, Any]](), []
        while left and len(seen) < MOST_FOUND:
            value = left.popleft()
            if isinstance(value, PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            with suppress(Exception):  # whatever it is, it is not looked into
                if isinstance(value, GENERATORS):
                    self.generators += [value] if id(value) not in self._orders else []
                    continue
                if callable(getattr(type(value), "fileno", None)):
                    self.channels.append(value.fileno())
                left.extend(_inside(value))
                found += [(type(value), vars(value))] if isinstance(getattr(value, "__dict__", None), dict) else []
        return found

    def after_fetch(self) -> str | None:
        """After one of the loop's first fetches: an attribute that they change, which from a worker the loop would not see."""
        for own, then in self._members:
            new = ((name, value, then.get(name, MISSING)) for name, value in own.items())
            self.made += [(own, name, was) for name, value, was in new if value is not was and was in (MISSING, None)]
        before, self._members, self._sizes = self._sizes, [], {}
        for kind, own in self._walk():
            if is_users(kind.__module__) and not any(isinstance(each, GENERATORS) for each in own.values()):
                self._sizes |= {f"{kind.__name__}.{name}": _size(value) for name, value in own.items()}
        return next((name for name, size in before.items() if self._sizes.get(name) != size), None)

    def base(self) -> int:
        """A seed from the state of the generators, which move on."""
        return functools.reduce(mixed, map(drawn_from, self.generators), 0)

    def prepare(self, keep: int) -> None:
        """Make a forked worker harmless to the training, and undo in it what the loop's first fetch has made."""
        own_files(writable=True)
        cut_channels([keep, *self.channels])
        for owner, name, was in self.made:
            owner[name] = was
            if was is MISSING:
                del owner[name]
        for each in signal.valid_signals():
            if callable(signal.getsignal(each)):
                signal.signal(each, signal.SIG_IGN if each in IGNORED else signal.SIG_DFL)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        return list(itertools.islice(value.values() if isinstance(value, Mapping) else value, MOST_ITEMS))
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return inspect.getclosurevars(value).nonlocals.values()
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(getattr(value, "__dict__", {}).values())


def _size(value: Any) -> Any:
    """What changes where something is noted or counted."""
    if isinstance(value, (list, dict, set, deque)):
        return len(value)
    return value if isinstance(value, (bool, int, float, str, bytes)) else None


class Indices:
    """The index batches of one epoch, which workers draw ahead.

    Attributes:
        again: What comes first, such as what workers did not deliver.
        error: What the sampler has raised while workers drew, which is the loop's, at the batch that it comes to.
        draws_from_all: Whether the sampler draws from a global generator between two batches; none may be drawn ahead.
    """

    def __init__(self, batches: Iterator[Any], sampler: Any) -> None:
        self._batches, self.again, self.draws_from_all = batches, deque[Any](), False
        self._watched = 0 if type(getattr(sampler, "sampler", sampler)).__module__.startswith("torch.") else PROOF
        self.error: Exception | None = None

    def __next__(self) -> Any:
        if self.again:
            return self.again.popleft()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not self._watched:
            return next(self._batches)
        before, torchs_before, self._watched = states(), torch.get_rng_state(), self._watched - 1
        drawn = next(self._batches)
        is_same = states() == before and torch.equal(torch.get_rng_state(), torchs_before)
        self.draws_from_all |= self._watched < PROOF - 1 and not is_same
        return drawn

    def ahead(self) -> Iterator[Any]:
        """What workers draw."""
        while True:
            try:
                drawn = next(self)
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                return
            yield drawn

    def seen(self, count: int) -> list[Any]:
        """The next ones, which are the loop's, too."""
        drawn = list(itertools.islice(self.ahead(), count))
        self.again.extendleft(reversed(drawn))
        return drawn


class BesideIter(ElasticIter):
    """The workers' iterator beside the loop, which nobody but `UnaskedIter` sees.

    Attributes:
        offset: What is added to the number of a batch for its number in the epoch.
    """

    def __init__(
        self, loader: Any, workers: int, depth: int, live: Any, base: Seed, offset: int, indices: Iterator[Any]
    ) -> None:
        how = live.how
        context = torch.multiprocessing.get_context(how.get("multiprocessing_context") or "fork")
        self._base, self.offset = base, offset
        prepare = live.parts.prepare if context.get_start_method() == "fork" else None
        view = View(
            loader, None, _index_sampler=indices, generator=torch.Generator(), multiprocessing_context=context, timeout=0,
            persistent_workers=bool(how.get("persistent_workers")),
        )  # fmt: skip
        special = torch.initial_seed(), prepare, live.parts.generators
        super().__init__(
            view, workers, depth, asked=0, is_seeded=True, fetch_threads=live.fetch_threads, special=special
        )

    def seed_of(self, number: int) -> Seed:
        return batch_seed(self._base, number + self.offset)

    def again(self, loader: Any, base: Seed, offset: int, indices: Iterator[Any]) -> None:
        """Another epoch, with the workers of the one before."""
        self._index_sampler, self._base, self.offset = indices, base, offset
        self._reset(loader)

    def go_on(self, indices: Iterator[Any], number: int) -> None:
        """Nothing is outstanding: give out these from now on, the first of them with this number in the epoch."""
        self._sampler_iter, self.offset = indices, number - self._send_idx

    @property
    def come(self) -> tuple[Any, ...]:
        """The next batch; nothing where it has not come."""
        return tuple(self._task_info[self._rcvd_idx][1:])

    @property
    def is_awaited(self) -> bool:
        """Whether the next batch is worth waiting for: its worker has answered before."""
        return not self.come and self._task_info[self._rcvd_idx][0] in self.answered

    def kill_worker(self) -> None:
        """That of the next batch takes too long; another one takes its place."""
        worker = self._task_info[self._rcvd_idx][0]
        self.answered.discard(worker)
        self._workers[worker].kill()

    def _shutdown_workers(self, is_exiting: Any = torchs.is_exiting) -> None:
        """As torch's, which waits for each worker; not for those that have not answered."""
        if is_exiting() or os.getpid() != self._process:
            return
        for number, process in enumerate(getattr(self, "_workers", ())):
            if number not in self.answered:
                process.kill()
        super()._shutdown_workers()

    def end(self) -> list[Any]:
        """It is over before the epoch is; returns the indices of what was not delivered."""
        self.answered.clear()
        self._shutdown_workers()
        return [self._given[number] for number in range(self._rcvd_idx, self._send_idx)]


def batch_seed(base: Seed, number: int) -> Seed:
    return mixed(base[0], number), mixed(base[1], number)


class UnaskedIter(TunedIter, torchs.LoopIter):  # type: ignore[misc]
    """The loop's own fetches, and workers where these pay."""

    _sampler_iter: Any

    def __init__(self, loader: Any, live: Any, begun: float) -> None:
        self._begin(live, begun)
        self._beside: BesideIter | None = None
        self._own = list[Any]()  # digests of the batches that workers are to prove themselves with
        none = {"num_workers": 0, "prefetch_factor": None, "timeout": 0, "persistent_workers": False}
        torchs.LoopIter.__init__(self, View(loader, loader, **none))
        self._sampler_iter = self._indices = Indices(self._sampler_iter, self._index_sampler)
        self._view, self._number, self._config = View(loader, None), 0, live.tuner.asked
        live.parts = live.parts or Parts(loader)
        self._base = int(self._base_seed), live.parts.base()
        draws = not draws_nothing(loader.dataset, loader.collate_fn)
        self._seeds = Seeds(torch.initial_seed(), live.parts.generators) if draws else None
        live.tell(0, None)
        # Workers begin with the first batch: sampler and seeds are drawn as without.
        self._loop.started(time.monotonic())

    @property
    def _workers(self) -> list[Any]:
        return [] if self._beside is None else list(self._beside._workers)

    def _next_data(self) -> Any:
        live = self._live
        if self._beside is not None and self._beside.outstanding:
            try:
                (self._wait if live.is_proven else self._compare)(self._beside)
            except RuntimeError as error:  # workers were lost again and again
                self._give_up(Kept.WORKERS_LOST(error=error))
        beside = self._beside
        if beside is None or not (live.is_proven and beside.outstanding):
            batch = self._fetched(next(self._indices))
            if beside is not None and not live.is_proven and len(self._own) < beside._send_idx:
                self._own.append(_digest_or_error(batch))
            return batch
        if not beside.come or isinstance(beside.come[0], torchs.ExceptionWrapper):
            return self._fetched(beside.pass_over())  # raises what is the data's own
        self._number += 1
        batch = beside._next_data()
        self.indices, self.fetch = beside.indices, beside.fetch
        return batch

    def _wait(self, beside: BesideIter) -> None:
        """For the next batch of a worker that has answered before."""
        live, begun = self._live, time.monotonic()
        patience_s = float(live.how.get("timeout") or max(PATIENCE_S, PATIENCE_FETCHES * live.slowest_s))
        beside.poll()
        while beside.is_awaited:
            if (left_s := begun + patience_s - time.monotonic()) > 0:
                beside.poll(left_s)
            else:
                beside.kill_worker()

    def _compare(self, beside: BesideIter) -> None:
        """What workers have made by now, with what the loop has made of the same indices."""
        live = self._live
        beside.poll()
        while beside.outstanding and beside._rcvd_idx < len(self._own) and beside.come:
            own, theirs, number = self._own[beside._rcvd_idx], beside.come[0], beside._rcvd_idx + beside.offset
            beside.pass_over()
            if isinstance(theirs, torchs.ExceptionWrapper):
                self._give_up(Kept.WORKER_ERROR(error=str(theirs.exc_msg).strip().splitlines()[-1]))
                return
            if own != (known := _digest_or_error(theirs)):
                what = f"it cannot be compared: {known}" if isinstance(known, Exception) else "another batch"
                self._give_up(Kept.SAMPLES_DIFFER(batch=number, what=what))
                return
            live.equal += 1
        live.is_proven = live.equal >= PROOF

    def _fetched(self, indices: Any) -> Any:
        live, begun, cpu = self._live, time.monotonic(), time.thread_time()
        number, self._number, self.indices = self._number, self._number + 1, indices
        make = self._dataset_fetcher.fetch
        try:
            # Elsewhere than in the main thread the training may draw meanwhile.
            if self._seeds is None or threading.current_thread() is not threading.main_thread():
                batch = make(indices)
            else:
                batch = self._seeds.around(make, indices, batch_seed(self._base, number))
        finally:
            if live.fetched < PROOF:
                live.fetched += 1
                if (what := live.parts.after_fetch()) is not None and self._tuner.refused is None:
                    self._tuner.refuse(Kept.DATASET_CHANGES(what=what))
        end = time.monotonic()
        live.slowest_s = max(live.slowest_s, end - begun)
        self.fetch = MAIN_PROCESS, begun, end, end, time.thread_time() - cpu
        return torchs.pin(batch, self._pin_memory_device) if self._pin_memory else batch

    def _apply(self) -> None:
        live, tuner, beside = self._live, self._tuner, self._beside
        if self._indices.draws_from_all and tuner.refused is None:
            tuner.refuse(Kept.SAMPLER_DRAWS())
        wanted, in_flight = tuner.wanted, 0 if beside is None else beside.outstanding
        if wanted.num_workers and beside is None:
            beside = self._beside = self._begun_beside(wanted)
        if not live.is_proven and wanted.num_workers:  # it is applied once they are
            return
        if beside is not None:
            if not beside.outstanding:
                beside.go_on(self._indices.ahead(), self._number)
            beside.resize(wanted.num_workers, wanted.prefetch_factor or 1)
            tuner.start_s, live.batch_bytes = beside.start_s, beside._worker_result_queue.batch_bytes
        self._config = wanted
        live.tell(wanted.num_workers, wanted.prefetch_factor)
        tuner.applied(time.monotonic(), in_flight)

    def _begun_beside(self, wanted: LoaderConfig) -> BesideIter:
        """Workers for what the loop fetches next; before they are proven, two for the few batches of the proof."""
        live = self._live
        beside: BesideIter | None = live.beside
        if live.is_proven:
            workers, depth, indices = wanted.num_workers, wanted.prefetch_factor or 1, self._indices.ahead()
        else:
            workers, depth, indices = 2, 2, iter(self._indices.seen(PROOF - live.equal))
        if beside is None:
            return BesideIter(self._view, workers, depth, live, self._base, self._number, indices)
        live.beside = None
        beside.again(self._view, self._base, self._number, indices)
        return beside

    def _give_up(self, why: Finding) -> None:
        """The loop fetches on; what workers have not delivered is its own again."""
        assert self._beside is not None
        undelivered, self._beside = self._beside.end(), None
        if self._live.is_proven:
            self._indices.again.extendleft(reversed(undelivered))
            self._tuner.failed(time.monotonic())
        else:
            self._tuner.refuse(why)
        self._config = self._tuner.wanted
        self._live.tell(0, None)

    def _end(self) -> None:
        super()._end()
        beside, self._beside = self._beside, None
        if beside is not None and self._live.how.get("persistent_workers"):
            self._live.beside = beside
        elif beside is not None and self._live.is_proven:
            beside._shutdown_workers()
        elif beside is not None:
            beside.end()


class Near(tuple[float, ...]):
    """Sums over a batch, the last one of absolute values; equal if they differ by no more than rounding."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and all(abs(a - b) <= NEAR * self[-1] for a, b in zip(self, other, strict=True))


def digest(value: Any, depth: int = MOST_DEPTH) -> Any:
    """What a batch consists of, in few bytes: types, exact values or their hashes, and sums of floats."""
    kind = type(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.number, float, complex)):
        return kind, _of_numbers(value)
    if isinstance(value, (Mapping, list, tuple)) and depth:
        items = [(repr(key), each) for key, each in value.items()] if isinstance(value, Mapping) else value
        return kind, [digest(each, depth - 1) for each in items]
    if not depth or value is None or isinstance(value, (bool, int, str, bytes, bytearray, type, set, frozenset)):
        return kind, value
    reduced = value.__reduce_ex__(4)
    return kind, reduced if isinstance(reduced, str) else [digest(each, depth - 1) for each in reduced[1:3]]


def _of_numbers(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
        return value.dtype, value.shape, digest(value.tolist())
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))
        attributes = digest(vars(value)) if isinstance(value, torch.Tensor) and vars(value) else None
        if tensor.is_nested:
            return attributes, [_of_numbers(each) for each in tensor.unbind()]
        about = attributes, tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device.type
        flat = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        if not flat.is_floating_point():
            return *about, hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes()).digest()
        known = torch.nan_to_num(flat.double(), 0.0, 0.0, 0.0)
        place = torch.cos(torch.arange(flat.numel(), dtype=torch.float64))
        sums = known.sum(), known @ place, known.abs().sum()
        return *about, int(torch.isfinite(flat).sum()), Near(map(float, sums))


def _digest_or_error(batch: Any) -> Any:
    try:
        return digest(batch)
    except Exception as error:  # of somebody's own class of batches
        return error
