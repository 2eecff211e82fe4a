"""A value as a file without a name in memory: how the workload travels to a fresh process.

    pickle ── memory ── table: where each buffer of the pickle lies ── where the table begins (8 bytes)

The memory of views of one storage is in the file once; a memory map of a file is named, not copied. So is what another file has
already, where workloads are packed beside each other. The reader maps the files copy-on-write: each reading has memory of its
own, which costs nothing until it is written to.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import mmap
import os
import pickle
import socket
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from typing import IO, Any, cast

import cloudpickle
import numpy as np
import torch

from autotune_loader.machine.kernel import memfd
from autotune_loader.pipeline.by_value import put_classes_into_modules
from autotune_loader.pipeline.workload import DataSide, Workload, is_users
from autotune_loader.values.units import bytes_text

SMALLEST_BUFFER, ALIGNMENT = 256, 64
"""A smaller buffer stays in the pickle: its place in the table would cost as much. Torch aligns its own memory so."""
OWN_FILE = -1
"""In a table, in the place of a descriptor."""
SEARCH_DEPTH, SEARCHED_BYTES = 6, 1 << 26
"""How deep an attribute that cannot be pickled is looked for, and in how large a part."""
LIVE = (io.IOBase, socket.socket, Iterator)
PICKLING = {"__getstate__", "__reduce__", "__reduce_ex__"}
"""What settings are not: objects of these kinds, and of classes of the user's with one of these methods."""
TENSORS = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)
MOST_TENSORS = 245
"""The kernel passes at most 253 descriptors at once, of which a fork server needs four, and a worker's two queues four."""
TOO_MANY_TENSORS = (
    f"more than {MOST_TENSORS} tensors, each with a descriptor of its own. "
    "Try torch.multiprocessing.set_sharing_strategy('file_system')."
)
NOT_IMPORTED = "{name} is of a notebook or an interactive session, and not of a module that a worker could import"


class NotSentError(Exception):
    """A part of the workload cannot travel to another process, or is too large to."""

    @property
    def is_too_large(self) -> bool:
        return isinstance(self.__cause__, TooLargeError)


class TooLargeError(Exception):
    pass


class Packed(contextlib.ExitStack):
    """Files of data that several workloads may have in common, while it is open: what one holds, the others refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.fds = list[int]()
        self.places: dict[tuple[int, int], tuple[int, int, memoryview]] = {}
        """Where memory lies, by its address and length: file, position, and what keeps it from being used for anything else."""


@contextlib.contextmanager
def packed(workload: Workload, settings: Any, max_bytes: int, beside: Packed | None = None) -> Iterator[Sequence[int]]:
    """Files with settings, data and training, for the block: processes that have them mapped keep what they have.

    Workloads that are packed `beside` each other have memory of their data in common; behind the three files are then those
    to which they refer.

    Data and training are apart, since bursts without workers each read the data anew: a dataset that caches, or opens a file
    on first use, must not hand its filled cache to the next burst. An optimizer travels with the model whose parameters it
    points at. Each file has `max_bytes` at most.

    Raises:
        NotSentError: naming the part and why.
    """
    with contextlib.ExitStack() as files:
        fds, others = list[int](), [] if beside is None else [*beside.fds]
        for name, value in {"settings": settings, "dataset": workload.data, "model": workload.training}.items():
            fds.append(memfd("autotune-loader"))
            common = beside if value is workload.data else None
            (common or files).callback(os.close, fds[-1])
            try:
                write_archive(fds[-1], value, max_bytes, common)
            except Exception as error:
                why = f"is {error}" if isinstance(error, TooLargeError) else f"cannot be pickled ({error})"
                raise NotSentError(f"the {name} {why}") from error
        yield [*fds, *others]


def write_archive(fd: int, value: Any, max_bytes: int, beside: Packed | None = None) -> None:
    """Fill an empty file with a value, which is anything that cloudpickle takes; what lies in files `beside` it stays there.

    Raises:
        TooLargeError: it would be larger; known before any large buffer is copied.
    """
    with open(fd, "wb", buffering=1 << 20, closefd=False) as file:
        views, table = _pickled(value, _Limited(max_bytes, file)), list[int]()
        own: dict[tuple[int, int], tuple[int, int, memoryview]] = {}
        known = {} if beside is None else beside.places
        try:
            for view in views:
                address = np.frombuffer(view, np.uint8).ctypes.data, view.nbytes
                if address not in known and address not in own:
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    own[address] = OWN_FILE, file.tell(), view
                    file.write(view)
                table += *(known.get(address) or own[address])[:2], view.nbytes
            file.write(np.array([*table, file.tell()], dtype=np.int64).tobytes())
            file.flush()
            if beside is not None:
                beside.fds.append(fd)
                beside.places.update({address: (fd, begin, view) for address, (_, begin, view) in own.items()})
        except OSError as error:
            raise TooLargeError(f"larger than there is room for ({error.strerror})") from error


def read_archive(fd: int) -> Any:
    """The value that another process has written, in memory of its own."""
    memory = _mapped(fd)
    (end,) = np.frombuffer(memory[-8:], np.int64)
    table = np.frombuffer(memory[end:-8], np.int64).reshape(-1, 3).tolist()
    maps = {OWN_FILE: memory, **{other: _mapped(other) for other in {row[0] for row in table} - {OWN_FILE}}}
    value = pickle.loads(memory, buffers=(maps[file][begin : begin + size] for file, begin, size in table))
    put_classes_into_modules()
    return value


def _mapped(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def pickled(value: Any, max_bytes: float) -> bytes:
    """Settings of another process as they are now, with the memory of small tensors and arrays in the pickle.

    Raises:
        TooLargeError: They would be larger.
        pickle.PicklingError: They hold what may be changed by being copied, or by the end of a copy.
    """
    memory = io.BytesIO()
    file = _Limited(max_bytes, memory)

    def is_copied(buffer: pickle.PickleBuffer) -> bool:
        file.check(buffer.raw().nbytes)  # it counts as it is written
        return True

    _SettingsPickler(file, is_copied).dump(value)
    return memory.getvalue()


def part_at_fault(workload: Workload) -> str:
    """The deepest attribute of a workload that cannot be pickled, such as `dataset.lock`."""
    sides = (workload.data, workload.training)
    parts = [(each.name, getattr(side, each.name)) for side in sides for each in fields(side)]
    return next((path for name, part in parts if (path := _fault_in(name, part))), "the workload")


def why_not_sent(data: DataSide, method: str) -> str | None:
    """Which part of the data no worker could be sent, and why; None where each could, or gets it as a fork.

    No tensor is copied. A part that is too large to be looked through is taken to be one that can be sent.
    """
    if method == "fork":
        return None
    pickler, popen, name = _WorkersPickler(_Limited(SEARCHED_BYTES), method), cast(Any, _Descriptors()), ""
    try:
        context.set_spawning_popen(
            popen
        )  # only for a process that starts do locks and queues let themselves be pickled
        for name in ("dataset", "collate_fn", "worker_init_fn"):
            pickler.dump(getattr(data, name))
    except TooLargeError:
        return None
    except Exception as error:
        return f"{name} ({error})"
    finally:
        context.set_spawning_popen(None)
    return None


class _Descriptors:
    """Takes the descriptors that a process is sent, in the place of what starts it."""

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> int:  # noqa: N802 - as multiprocessing calls it
        return fd


class _WorkersPickler(ForkingPickler):
    """Pickles what a worker is sent as `multiprocessing` does, but for the memory of tensors and arrays."""

    def __init__(self, file: _Limited, method: str) -> None:
        super().__init__(file, 5, True, lambda buffer: None)
        kinds = {*TENSORS, *(kind for kind in self.dispatch_table if issubclass(kind, TENSORS))}
        self.dispatch_table.update(dict.fromkeys(kinds, self._counted))
        is_limited = method == "forkserver" and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
        self._tensors, self._most_tensors = 0, MOST_TENSORS if is_limited else math.inf

    def reducer_override(self, value: Any) -> Any:
        is_global = isinstance(value, (type, types.FunctionType))
        if is_global and value.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise pickle.PicklingError(NOT_IMPORTED.format(name=value.__qualname__))
        return NotImplemented

    def _counted(self, _tensor: Any) -> tuple[Any, ...]:
        self._tensors += 1
        if self._tensors > self._most_tensors:
            raise ValueError(TOO_MANY_TENSORS)
        return int, ()


def _fault_in(path: str, value: Any, depth: int = SEARCH_DEPTH) -> str | None:
    try:
        _pickled(value, _Limited(SEARCHED_BYTES))
    except TooLargeError:
        return None
    except Exception:
        inner = (_fault_in(f"{path}.{name}", part, depth - 1) for name, part in _parts_of(value).items())
        return next((found for found in inner if found), path) if depth else path
    return None


def _parts_of(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            used = inspect.getclosurevars(value)
            return {**used.nonlocals, **used.globals}
    return value if isinstance(value, Mapping) else dict(getattr(value, "__dict__", {}))


def _pickled(value: Any, file: _Limited) -> list[memoryview]:
    """Write the pickle; the memory that it refers to, in the order in which it does."""
    views: list[memoryview] = []

    def is_copied(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= SMALLEST_BUFFER:
            views.append(view)
            file.count(view.nbytes)
        return view.nbytes < SMALLEST_BUFFER

    _ArchivePickler(file, is_copied).dump(value)
    return views


class _ArchivePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, so that classes of a notebook cell travel too; the memory of tensors and arrays stays out of the pickle."""

    def __init__(self, file: Any, is_copied: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, protocol=5, buffer_callback=is_copied)
        self._layouts: dict[Any, Any] = {}

    def dump(self, value: Any) -> None:
        main = sys.modules.get("__mp_main__")  # the script, in a process that `multiprocessing` has spawned
        if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
            super().dump(value)
            return
        cloudpickle.register_pickle_by_value(main)
        try:
            super().dump(value)
        finally:
            cloudpickle.unregister_pickle_by_value(main)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            # Less for pickle to remember than torch's: a dataset may be a list of a million tensors. On a GPU torch would send
            # each view with a storage of its own.
            layout = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
            layout = self._layouts.setdefault(layout, layout)
            return _tensor, (value.untyped_storage(), value.storage_offset(), layout)
        if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            memory: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value.cpu()).numpy()
            return _storage, (pickle.PickleBuffer(memory), value.nbytes(), str(value.device))
        if isinstance(value, SharedMemory):
            raise pickle.PicklingError(f"shared memory {value.name!r}, which another process would remove at its end")
        if isinstance(value, np.memmap) and (place := _place_in_file(value)) is not None:
            return np.memmap, place
        return super().reducer_override(value)


class _SettingsPickler(_ArchivePickler):
    """The same, which runs no code of the user's: live objects, such as a client or a file, are the script's alone."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if not isinstance(value, (type, types.FunctionType)):
            is_own = any(is_users(each.__module__) for each in kind.__mro__ if vars(each).keys() & PICKLING)
            of_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
            if is_own or of_device or issubclass(kind, LIVE) or hasattr(kind, "__del__"):
                raise pickle.PicklingError(f"a {kind.__qualname__} is the script's alone")
        return super().reducer_override(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    has_more = tensor.__dict__ or tensor._backward_hooks or tensor.grad_fn is not None
    return is_dense and not has_more and not tensor.is_conj() and not tensor.is_neg()


def _tensor(storage: torch.UntypedStorage, offset: int, layout: tuple[Any, ...]) -> torch.Tensor:
    dtype, shape, strides, requires_grad = layout
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape, strides).requires_grad_(requires_grad)


def _storage(buffer: Any, size: int, device: str) -> torch.UntypedStorage:
    bytes_ = torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
    if size < SMALLEST_BUFFER:
        bytes_ = bytes_.clone()  # may be resized, as small state sometimes is
    return bytes_.to(device).untyped_storage()


def _place_in_file(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """The arguments of `np.memmap` for the same elements of the same file; None where they must be copied."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    memory, name = getattr(array, "_mmap", None), array.filename
    # What was written to a copy-on-write map is not in its file.
    if array.mode == "c" or memory is None or name is None or not array.size or not contiguous or array.dtype.hasobject:
        return None
    if not os.path.isfile(name):  # noqa: PTH113 - numpy keeps names of any kind
        return None
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = begin + array.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    mode = "r" if array.mode == "r" else "c"  # a burst must not write to the user's file
    return os.fspath(name), array.dtype, mode, offset, array.shape, "C" if array.flags.c_contiguous else "F"


class _Limited:
    """A file that refuses more than a limit, so that no 100 GB are pickled in vain; without a file it only counts."""

    def __init__(self, max_bytes: float, file: IO[bytes] | None = None) -> None:
        self._max_bytes, self._file, self._total = max_bytes, file, 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count(size)
        if self._file is not None:
            self._file.write(data)
        return size

    def count(self, size: int) -> None:
        self.check(size)
        self._total += size

    def check(self, size: int) -> None:
        """Refuse what would not fit, before it is copied."""
        if self._total + size > self._max_bytes:
            raise TooLargeError(f"larger than {bytes_text(self._max_bytes)}")
