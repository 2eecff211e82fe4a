"""What no fork may carry: positions, connections, threads and generators that two processes would share, or lose.

A forked worker shares the position of an open file with the training process and with every other worker; it has none of
its threads; a connection that both write to is broken for both; a generator goes on twice. Classes are known by name, so
that nothing is imported for their sake.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

SHARED = {
    "zipfile.ZipFile": "an open archive",
    "tarfile.TarFile": "an open archive",
    "_csv.reader": "a reader with a position",
    "csv.DictReader": "a reader with a position",
    "rasterio.io.DatasetReader": "an open raster file",
    "cv2.VideoCapture": "an open video",
    "av.container.core.Container": "an open video",
    "decord.video_reader.VideoReader": "an open video",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "an iterator of a DataLoader",
    "multiprocessing.managers.BaseManager": "a manager's process",
    "multiprocessing.managers.BaseProxy": "a connection to a manager",
}
"""Classes, and all that inherit from them, by module and name: workers would share a position or server, a single fork may."""
BOUND = {
    "sqlite3.Connection": "a database connection",
    "sqlite3.Cursor": "a database connection",
    "lmdb.Environment": "an open LMDB environment",
    "environment_t.Environment": "an open LMDB environment",
    "h5py._hl.files.File": "an open HDF5 file",
    "h5py._hl.base.HLObject": "a part of an open HDF5 file",
    "h5py.h5f.FileID": "an open HDF5 file",
    "tables.file.File": "an open HDF5 file",
    "netCDF4._netCDF4.Dataset": "an open NetCDF file",
    "socket.socket": "a socket",
    "ssl.SSLSocket": "a socket",
    "requests.sessions.Session": "connections",
    "urllib3.poolmanager.PoolManager": "connections",
    "http.client.HTTPConnection": "a connection",
    "botocore.client.BaseClient": "connections",
    "aiohttp.client.ClientSession": "connections",
    "httpx._client.BaseClient": "connections",
    "redis.client.Redis": "connections",
    "pymongo.mongo_client.MongoClient": "connections",
    "psycopg2.extensions.connection": "a database connection",
    "psycopg.connection.BaseConnection": "a database connection",
    "psycopg._connection_base.BaseConnection": "a database connection",
    "sqlalchemy.engine.base.Engine": "a database connection",
    "duckdb.duckdb.DuckDBPyConnection": "a database connection",
    "concurrent.futures._base.Executor": "an executor",
    "concurrent.futures._base.Future": "work of an executor",
    "threading.Thread": "a thread",
    "threading.Timer": "a thread",
    "threading.Barrier": "a barrier of threads",
    "queue.Queue": "a queue between threads",
    "queue.SimpleQueue": "a queue between threads",
    "_queue.SimpleQueue": "a queue between threads",
    "subprocess.Popen": "a child process",
    "multiprocessing.process.BaseProcess": "a child process",
    "multiprocessing.pool.Pool": "a pool of processes",
    "multiprocessing.queues.Queue": "a queue between processes",
    "multiprocessing.queues.SimpleQueue": "a queue between processes",
    "multiprocessing.connection._ConnectionBase": "a connection",
    "asyncio.events.AbstractEventLoop": "an event loop",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "an iterator with workers",
    "torch.cuda.streams.Stream": "a CUDA stream",
}
"""Classes that work in the process that made them only."""
ITERATORS = ("builtins", "itertools")
"""Modules whose iterators have a position; `itertools.repeat` gives the same at each."""
IN_MEMORY = (io.BytesIO, io.StringIO)
"""Each process has its own; whether it moves is looked at."""


def handle_in(value: Any) -> str | None:
    """What no fork may carry, in words ("an open file"); None for a value that may be carried."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, io.IOBase):
        is_open = not isinstance(value, IN_MEMORY) and not value.closed
        return f"an open file ({_named(value)})" if is_open and not _is_standard(value) else None
    if type(value).__module__ in ITERATORS and hasattr(type(value), "__next__"):
        return None if isinstance(value, itertools.repeat) else "a generator or iterator"
    if _is_held(value):
        return "a lock that is held"
    return _by_name(value, BOUND) or _by_name(value, SHARED)


def bound_to_process(value: Any) -> bool:
    """Whether it works in the process that made it only; a single fork may carry what has but a position."""
    return _by_name(value, BOUND) is not None


def _by_name(value: Any, classes: Mapping[str, str]) -> str | None:
    for kind in type(value).__mro__:
        words = classes.get(f"{kind.__module__}.{kind.__qualname__}")
        if words is not None:
            return words if _is_open(value) else None
    return None


def _of_tensor(tensor: torch.Tensor) -> str | None:
    if tensor.device.type not in ("cpu", "meta"):
        return f"a tensor on {tensor.device}"
    return "a tensor that requires a gradient" if tensor.requires_grad else None


def _named(file: Any) -> str:
    return repr(getattr(file, "name", None) or type(file).__name__)


def _is_standard(file: Any) -> bool:
    """Whether it is standard output or the like, which loggers hold, or the null device."""
    try:
        number = file.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return number in (1, 2) or os.path.realpath(f"/proc/self/fd/{number}") == os.devnull


def _is_held(value: Any) -> bool:
    if isinstance(value, (type(threading.Lock()), threading.Semaphore)):
        locked = getattr(value, "locked", None)
        return bool(locked()) if locked is not None else value._value == 0  # type: ignore[union-attr]
    return isinstance(value, type(threading.RLock())) and repr(value).startswith("<locked")


def _is_open(value: Any) -> bool:
    """False where it is known to be closed or ended."""
    if getattr(value, "closed", False) is True or getattr(value, "fp", value) is None:
        return False
    if isinstance(value, threading.Thread):
        return value.is_alive()
    if type(value).__module__ == "subprocess":
        return getattr(value, "returncode", None) is None
    if type(value).__module__.startswith("h5py."):
        return bool(value)
    if hasattr(value, "fileno") and type(value).__module__ in ("socket", "ssl"):
        return bool(value.fileno() != -1)
    return True
