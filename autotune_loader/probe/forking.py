"""Forks of the caller's process: what runs in them changes nothing of the caller's, and they end without finalisers.

A fork has one thread. Locks that others held stay held, and a pool of threads is empty: so everything has a deadline.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.connection import Pipe
from typing import NoReturn

import psutil
import torch

from autotune_loader.machine.inherited import own_files
from autotune_loader.probe.leaving import leave


def fork(run: Callable[[], object], output_fd: int | None = None) -> psutil.Process:
    """A process forked from this one.

    Args:
        run: what it does; it ends afterwards, whatever happens.
        output_fd: where it writes what it would print.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which is what deadlines are for.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _live(run, output_fd)
    return psutil.Process(pid)


def in_fork(run: Callable[[], bytes], deadline_s: float) -> bytes | str:
    """What `run` returns in a fork of this process, or in words why it has returned nothing; it must not raise.

    Args:
        run: what is run there.
        deadline_s: it is killed then.
    """
    ours, theirs = Pipe(duplex=False)
    process = fork(lambda: theirs.send_bytes(run()))
    theirs.close()
    try:
        if not ours.poll(deadline_s):
            return f"no end within {deadline_s:.0f} s in a fork of this process"
        return ours.recv_bytes()
    except EOFError:
        status = None
        with contextlib.suppress(psutil.TimeoutExpired):
            status = process.wait(1.0)
        return f"a fork of this process ended with status {status}"
    finally:
        if process.is_running():
            for kill in (os.killpg, os.kill):  # its group, which it may not have made yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(process.pid, signal.SIGKILL)
        process.wait()
        ours.close()


def _live(run: Callable[[], object], output_fd: int | None) -> NoReturn:
    """The whole life of a fork."""
    code = 1
    try:
        gc.freeze()  # what the caller has left to the collector is the caller's to finalise
        with contextlib.suppress(OSError):
            os.setsid()  # a process group of its own: Ctrl-C on the terminal is the caller's
        _listen_to_no_signals()
        _print_to(output_fd)
        own_files()
        # Connections to managers, for one, are made anew, as in multiprocessing's own forks.
        util._run_after_forkers()  # type: ignore[attr-defined]
        torch.set_num_threads(1)  # the pool of threads is not there
        run()
        code = 0
    except BaseException:
        if output_fd is not None:
            sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def _listen_to_no_signals() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)


def _print_to(output_fd: int | None) -> None:
    """Read from nowhere, and print to a file or nowhere; what the caller's buffers hold is the caller's to print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, source in enumerate((nowhere, *[nowhere if output_fd is None else output_fd] * 2)):
        os.dup2(source, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
