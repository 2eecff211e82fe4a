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
from typing import Any

import torch

MANAGER = "a connection to a manager"
SHARED = {
    "an open archive": "zipfile.ZipFile tarfile.TarFile",
    "a reader with a position": "_csv.reader csv.DictReader",
    "an open raster file": "rasterio.io.DatasetReader",
    "an open video": "cv2.VideoCapture av.container.core.Container decord.video_reader.VideoReader",
    "an iterator of a DataLoader": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "a manager's process": "multiprocessing.managers.BaseManager",
    MANAGER: "multiprocessing.managers.BaseProxy",
}
"""Classes, and all that inherit from them, by module and name: workers would share a position or server, a single fork may."""
BOUND = {
    "a database connection": "sqlite3.Connection sqlite3.Cursor psycopg2.extensions.connection "
    "psycopg.connection.BaseConnection psycopg._connection_base.BaseConnection sqlalchemy.engine.base.Engine "
    "duckdb.duckdb.DuckDBPyConnection",
    "an open LMDB environment": "lmdb.Environment environment_t.Environment",
    "an open HDF5 file": "h5py._hl.files.File h5py._hl.base.HLObject h5py.h5f.FileID tables.file.File",
    "an open NetCDF file": "netCDF4._netCDF4.Dataset",
    "a socket": "socket.socket ssl.SSLSocket",
    "a connection": "http.client.HTTPConnection multiprocessing.connection._ConnectionBase requests.sessions.Session "
    "urllib3.poolmanager.PoolManager botocore.client.BaseClient aiohttp.client.ClientSession httpx._client.BaseClient "
    "redis.client.Redis pymongo.mongo_client.MongoClient",
    "an executor, or work of one": "concurrent.futures._base.Executor concurrent.futures._base.Future",
    "a thread": "threading.Thread",
    "a barrier of threads": "threading.Barrier",
    "a queue between threads": "queue.Queue queue.SimpleQueue _queue.SimpleQueue",
    "a child process": "subprocess.Popen multiprocessing.process.BaseProcess",
    "a pool of processes": "multiprocessing.pool.Pool",
    "a queue between processes": "multiprocessing.queues.Queue multiprocessing.queues.SimpleQueue",
    "an event loop": "asyncio.events.AbstractEventLoop",
    "an iterator with workers": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "a CUDA stream": "torch.cuda.streams.Stream",
}
"""Classes that work in the process that made them only."""
WORDS = {
    name: (words, table is BOUND)
    for table in (SHARED, BOUND)
    for words, names in table.items()
    for name in names.split()
}
ITERATORS = ("builtins", "itertools")
"""Modules whose iterators have a position; `itertools.repeat` gives the same at each."""
IN_MEMORY = (io.BytesIO, io.StringIO)
"""Each process has its own; whether it moves is looked at."""
LOCK, RLOCK = type(threading.Lock()), type(threading.RLock())


def handle_in(value: Any) -> str | None:
    """What no fork may carry, in words ("an open file"); None for a value that may be carried."""
    if isinstance(value, torch.Tensor):
        if value.device.type not in ("cpu", "meta"):
            return f"a tensor on {value.device}"
        return "a tensor that requires a gradient" if value.requires_grad else None
    if isinstance(value, io.IOBase):
        if isinstance(value, IN_MEMORY) or value.closed or _is_standard(value):
            return None
        return f"an open file ({getattr(value, 'name', None) or type(value).__name__!r})"
    if type(value).__module__ in ITERATORS and hasattr(type(value), "__next__"):
        return None if isinstance(value, itertools.repeat) else "a generator or iterator"
    if _is_held(value):
        return "a lock that is held"
    return _known(value)[0]


def bound_to_process(value: Any) -> bool:
    """Whether it works in the process that made it only; a single fork may carry what has but a position."""
    return _known(value)[1]


def _known(value: Any) -> tuple[str | None, bool]:
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__)
    found = next((WORDS[name] for name in names if name in WORDS), None)
    return (None, False) if found is None or _has_ended(value) else found


def _is_standard(file: Any) -> bool:
    """Whether it is standard output or the like, which loggers hold, or the null device."""
    try:
        number = file.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return number in (1, 2) or os.path.realpath(f"/proc/self/fd/{number}") == os.devnull


def _is_held(value: Any) -> bool:
    if isinstance(value, threading.Semaphore):
        return value._value == 0
    return value.locked() if isinstance(value, LOCK) else isinstance(value, RLOCK) and repr(value).startswith("<locked")


def _has_ended(value: Any) -> bool:
    """Whether it is known to be closed or ended."""
    module = type(value).__module__
    if getattr(value, "closed", False) is True or getattr(value, "fp", value) is None:
        return True
    if isinstance(value, threading.Thread):
        return not value.is_alive()
    if module == "subprocess":
        return value.returncode is not None
    return (module.startswith("h5py.") and not value) or (module in ("socket", "ssl") and value.fileno() == -1)
