"""How workers are born: what torch takes for a multiprocessing context, whose queues are channels and whose workers are clones.

    fork                first workers: forks of the training      later ones: clones of a nursery, the data as at `iter()`
    spawn, forkserver   clones of a nursery, which is kept from epoch to epoch while it would be sent the same

Where there can be no nursery, they start as the method does.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import multiprocessing
import os
import pickle
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.channel import Channel, NoQueue, Results, close_channels
from autotune_loader.autoloader.guard import unguarded_line
from autotune_loader.autoloader.pinning import Pinner
from autotune_loader.autoloader.worker import OF_A_WORKER, OF_AN_EPOCH, Flag, Given, Setup, work
from autotune_loader.machine.clones import leave_signals
from autotune_loader.machine.elsewhere import descriptors, lead_nowhere
from autotune_loader.machine.facts import start_method
from autotune_loader.machine.nursery import Home, Nursery, Root
from autotune_loader.machine.parcel import Posted

REFUSED = (errno.ENOSYS, errno.EPERM)
"""What a kernel, or a sandbox, says that has no such call, or does not allow it."""
END_S = 1.0
"""A process whose channel has ended is dead a moment later; after this it is killed."""


def begin_root(loader: Any) -> None:
    """Begin with the imports of workers that were asked for, which takes seconds, while the script makes its model."""
    context = loader.multiprocessing_context
    method = start_method() if context is None else context.get_start_method()
    if loader.num_workers and loader.in_order and method != "fork" and not multiprocessing.current_process().daemon:
        with suppress(OSError, RuntimeError):  # which is seen when the first worker starts
            Root.here(_may_import)


def _may_import() -> bool:
    """Whether a new process may import the script, and would not run the training again."""
    return unguarded_line() is None


class Births:
    """A multiprocessing context whose queues are channels: torch asks for its result queue first, then for one a worker.

    Args:
        real: The context that starts processes.
        setup: What workers get beside the user's objects.
        held: Generators that these hold.
        home: Where a nursery of a new process is kept.
        pins: Whether batches are pinned as they arrive, where they lie if there is a `pinner`.
        has_nursery: Whether later workers are to be born in one; under `spawn` and `forkserver` all are.
        nursery_first: Whether it is to be there before the first worker.
    """

    def __init__(
        self,
        real: Any,
        setup: Setup,
        held: list[Any],
        pinner: Pinner | None,
        home: Home,
        *,
        pins: bool,
        has_nursery: bool,
        nursery_first: bool = False,
    ) -> None:
        self._real, self._setup, self._held, self._pinner, self._home = real, setup, held, pinner, home
        self._is_asked, self._nursery_first = setup.asked > 0, nursery_first
        self.method = str(real.get_start_method())
        """How processes start."""
        self._has_nursery = has_nursery or self.method != "fork"
        self.results = Results(pins=pins)
        self._is_first = True
        self._nursery: Nursery | None = None
        self._root_at: int | None = None
        """The batch at which the root was begun; -1 where it was there, or there is to be none."""
        self._given: Given | None = None
        self._passed: Any = None
        """What stands for it among the arguments of a worker."""
        self._made: Channel | None = None
        self._starting_at = 0.0
        self.start_s = 0.0
        """What starting a worker took last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def is_begun(self) -> bool:
        """Whether the nursery is there, though it may be importing; or there is to be none."""
        return not self._has_nursery or self._nursery is not None

    @property
    def is_prepared(self) -> bool:
        """Whether another worker may start now."""
        return self.is_begun and (self._nursery is None or self._nursery.wait(0))

    def Event(self) -> Flag:  # noqa: N802 - as in multiprocessing
        return Flag()

    def Queue(self) -> Any:  # noqa: N802
        if self._is_first:
            self._is_first = False
            return self.results
        if not self._is_asked and self._given is None:
            return NoQueue()
        self._clock()
        self.started()
        self._made, self._starting_at = Channel(self._pinner), time.monotonic()
        self.results.add(self._made)
        return self._made

    def Process(self, *, target: Any, args: Any) -> Any:  # noqa: N802
        arguments = torchs.with_dataset(dict(zip(torchs.parameters(target), args, strict=True)))  # versions differ
        if self._given is None:
            of_an_epoch = {name: arguments[name] for name in OF_AN_EPOCH if name in arguments}
            self._setup = self._setup._replace(arguments=of_an_epoch)
            known = {*OF_A_WORKER, *OF_AN_EPOCH}
            self._given = Given({name: arguments[name] for name in arguments if name not in known}, self._held)
            self._passed = self._given if self.method == "fork" else Posted(self._given)
            if self._nursery_first or (self._is_asked and self.method != "fork"):
                self.prepare()
        if not self._is_asked:
            return _Nobody()
        return self._process(arguments["worker_id"], arguments["num_workers"], is_later=False)

    def prepare(self, files: Collection[int] = (), batch: int = 0) -> None:
        """Have a nursery from now on, where there may be one; a new process is not waited for.

        Args:
            files: Descriptors that the dataset holds.
            batch: Where the loop is: where nobody asked, root and nursery begin at different ones.

        Raises:
            Exception: As `multiprocessing` raises where what workers get cannot be pickled.
        """
        if self._has_nursery and self._nursery is None:
            assert self._given is not None
            try:
                if self.method == "fork":
                    self._nursery = Nursery.forked([self._given], lambda: self._begin_fork(files))
                elif self._is_asked or self._has_root(batch):
                    self._nursery = self._home.nursery_for([self._given], self._held, _may_import)
                    self._has_nursery = self._nursery is not None
            except OSError as error:
                # Else workers start as the method does.
                self._has_nursery = error.errno not in REFUSED and self.method == "fork"

    def _has_root(self, batch: int) -> bool:
        """Whether it was begun at another batch, or there is to be none."""
        if self._root_at is None:
            before = Root.latest
            self._root_at = -1 if Root.here(_may_import) is before else batch
        return self._root_at != batch

    def _begin_fork(self, files: Collection[int]) -> dict[int, Any]:
        close_channels()
        handlers = leave_signals()
        if not self._is_asked:
            _leave_pipes(files)
        return handlers

    def start(self, number: int, count: int) -> tuple[Channel, Any]:
        """Another worker, of so many.

        Raises:
            OSError: No process can be started; or the nursery is gone, and nobody asked for workers.
            Exception: As `multiprocessing` raises where what workers get cannot be pickled.
        """
        if not self._is_asked and self._nursery is not None and self._nursery.has_failed:
            raise pickle.UnpicklingError(self._nursery.why_not)
        channel = self.Queue()
        try:
            born = self._process(number, count, is_later=True)
            try:
                born.start()
            except OSError as error:
                if self._is_asked or self.method != "fork":
                    raise
                self.close_nursery()  # it was killed, or may not clone
                self._has_nursery = error.errno not in REFUSED
                if self._has_nursery:
                    raise
                born = self._process(number, count, is_later=True)
                born.start()
        except BaseException:
            self.results.remove(channel)
            channel.close()
            raise
        finally:
            self._clock()
            self.started()
        return channel, born

    def _process(self, number: int, count: int, *, is_later: bool) -> Any:
        channel = self._made
        assert channel is not None
        channel.number = number
        one = self._real.Process(target=work, args=(self._passed, self._setup, channel.end, number, count), daemon=True)
        if self._nursery is not None and (is_later or self.method != "fork"):
            # What the training has opened since, a fork of it would have, too, where nobody asked for workers.
            may_fork = self._is_asked or self.method != "fork"
            popen = self._nursery.popen if may_fork else self._nursery.cloned
            one._Popen = functools.partial(popen, [self._passed])
        return one

    def started(self) -> None:
        """The latest worker has its end: as long as the loop had it, too, the channel would not end with the worker."""
        if self._made is not None:
            self._made.end.socket.close()
            self._made = None
        self._starting_at = 0.0

    def _clock(self) -> None:
        if self._starting_at:
            self.start_s = time.monotonic() - self._starting_at

    def close_nursery(self) -> None:
        """Later workers start as they do without. What may serve the next epoch is kept: no fork, and nothing with pipes."""
        if self._nursery is not None and self._nursery.key is None:
            self._nursery.close()
        self._nursery = None


class _Nobody:
    """What torch takes for a worker where there is to be none yet."""

    daemon, pid = True, 0

    def start(self) -> None: ...


def end_process(process: Any) -> None:
    """See a process end that has been told so."""
    process.join(END_S)
    if process.exitcode is None:
        kill(process)
        process.join()


def kill(process: Any) -> None:
    """Kill a process; where the script ignores SIGCHLD it may be gone without a word."""
    with suppress(ProcessLookupError):
        process.kill()


def _leave_pipes(files: Collection[int]) -> None:
    """Hold no writing end of the training's own pipes: a program that it feeds waits until nobody does."""
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    for fd in descriptors(3):
        with suppress(OSError):  # it was closed meanwhile
            is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
            if (
                is_pipe
                and fd != tracker
                and fd not in files
                and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            ):
                lead_nowhere(fd)
