"""In what does a worker of AutoLoader differ from torch's? What its samples tell of its process: a job of `births`."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from studies.live.births_jobs import loader_of

IMPORTED_BY = os.getpid()
UNSEEDED = np.random.default_rng()
"""A generator without a seed, made by an import: each process of its own draws other numbers."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGHUP", "SIGUSR1")


def leads_to(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


class Telling(Dataset[Any]):
    """Its samples tell what their process is, and use what the training shares with it."""

    unseeded = np.random.default_rng()
    is_registered = False

    def __init__(self, context: Any) -> None:
        self.queue, self.value, self.lock, self.event = (
            context.Queue(), context.Value("i", 0), context.Lock(), context.Event(),
        )  # fmt: skip
        self.ended = context.Value("b", False)
        self.shared, self.array = torch.zeros(4).share_memory_(), np.arange(5)
        self.training, self.group, self.session = os.getpid(), os.getpgid(0), os.getsid(0)
        self.environ, self.argv, self.path = dict(os.environ), sys.argv, sys.path
        self.outputs = [leads_to(number) for number in (1, 2)]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            self.value.value += 1
        self.shared[0], self.array[0] = 7, 3
        if not self.is_registered:
            self.is_registered = True
            atexit.register(self.at_exit)
        if index == 0:
            self.queue.put("from a worker")
            self.event.set()
        return {"fields": self.fields(), "draws": self.draws()}

    def at_exit(self) -> None:
        self.ended.value = True

    def fields(self) -> dict[str, Any]:
        """What must be as in torch's own worker."""
        process, parent, info = multiprocessing.current_process(), multiprocessing.parent_process(), get_worker_info()
        assert parent is not None
        assert info is not None
        square = np.ones((600, 600)) @ np.ones((600, 600))  # by a pool of threads, where numpy has one
        umask = os.umask(0)
        os.umask(umask)
        return {
            "name": process.name,
            "class": f"{type(process).__module__}.{type(process).__qualname__}",
            "daemon": process.daemon,
            "identity": list(process._identity),  # type: ignore[attr-defined]
            "its parent is the training": parent.pid == self.training,
            "its parent is alive": parent.is_alive(),
            "its parent's name": parent.name,
            "its parent is the system's, too": parent.pid == os.getppid(),
            "start method": multiprocessing.get_start_method(allow_none=True),
            "its own children": len(multiprocessing.active_children()),
            "__main__": sys.modules["__main__"].__name__,
            "module of the dataset": type(self).__module__,
            "imports ran in this process": os.getpid() == IMPORTED_BY,
            "info.id": info.id,
            "info.num_workers": info.num_workers,
            "info.dataset is the dataset": info.dataset is self,
            "info.seed is torch's": info.seed == torch.initial_seed(),
            "threads": threading.active_count(),
            "torch's threads": torch.get_num_threads(),
            "numpy multiplies": float(square.sum()) == 600.0**3,
            "handlers of signals": [str(signal.getsignal(getattr(signal, name))) for name in SIGNALS],
            "blocked signals": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
            "stdin": [leads_to(sys.stdin.fileno()), leads_to(0)],
            "stdout and stderr are the training's": self.outputs == [leads_to(number) for number in (1, 2)],
            "argv and path are the training's": [sys.argv == self.argv, sys.path == self.path],
            "cwd": str(Path.cwd()),
            "environment": sorted(name for name in os.environ if os.environ[name] != self.environ.get(name)),
            "group and session are the training's": [os.getpgid(0) == self.group, os.getsid(0) == self.session],
            "cores, niceness, umask": [len(os.sched_getaffinity(0)), os.nice(0), umask],
        }

    def draws(self) -> dict[str, float]:
        info = get_worker_info()
        assert info is not None
        return {
            "info.seed": info.seed,
            "torch": torch.rand(()).item(),
            "random": random.random(),
            "numpy": float(np.random.random()),  # noqa: NPY002 - the global generator is meant
            "a module's generator without a seed": float(UNSEEDED.random()),
            "a class's generator without a seed": float(self.unseeded.random()),
        }


def fields(which: str, method: str) -> dict[str, Any]:
    """What the first sample of each worker tells, by epoch, and what the training has of its shared objects at the end."""
    multiprocessing.set_start_method(method)
    data, workers = Telling(multiprocessing.get_context(method)), 2
    torch.manual_seed(5)
    loader, epochs, children = loader_of(which, data, workers, batch_size=4, collate_fn=list), [], list[int]()
    for _ in range(2):
        epochs.append([batch[0] for batch in loader][:workers])
    for _ in loader:
        children.append(len(multiprocessing.active_children()))
    heard = None
    with contextlib.suppress(Exception):  # nothing has come
        heard = data.queue.get(timeout=5)
    training = {
        "functions of atexit are called": bool(data.ended.value),
        "shared value": data.value.value,
        "shared tensor": data.shared.tolist(),
        "queue": heard,
        "event": data.event.is_set(),
        "array of the training": data.array.tolist(),
        "children of the training": children[0],
        "children after the epochs": len(multiprocessing.active_children()),
    }
    return {"epochs": epochs, "training": training}


def facts(first: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Of a side's workers, by field; what they draw is told by two runs alone, as AutoLoader seeds each batch."""
    workers = [[one["fields"] for one in epoch] for epoch in first["epochs"]]
    found = {name: [[one[name] for one in epoch] for epoch in workers] for name in workers[0][0]} | first["training"]
    for name in first["epochs"][0][0]["draws"]:
        one, other = ([[each["draws"][name] for each in epoch] for epoch in run["epochs"]] for run in (first, again))
        found |= {
            f"draws of {name}: reproducible": one == other,
            f"draws of {name}: workers differ": all(len(set(epoch)) == len(epoch) for epoch in one),
            f"draws of {name}: epochs differ": one[0] != one[1],
        }
    return found
