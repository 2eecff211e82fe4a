"""From an exception, an exit status or a text on stderr to a `Failure` that says what to do next."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from autotune_loader.bursts.files import refused_path, sample_writes
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import Failure, FailureKind, FailurePhase

AGAINST_SECONDS = "train_step=0.05 tunes the loader against a step of 0.05 s"
SHM_ADVICE = "raise /dev/shm (docker run --shm-size=8g) or use fewer workers"
MEMORY_ADVICE = "use a smaller batch or fewer workers"
KILLED = "was killed, most likely by the OOM killer: use fewer workers"
DEVICE_MEMORY_ADVICE = (
    "use a smaller batch, or free what else is on the device (models of this process count too: move them to the CPU until "
    f"the training begins); {AGAINST_SECONDS}"
)
DEVICE_TAKEN_ADVICE = (
    f"another process holds the GPU, which allows one process at a time (EXCLUSIVE_PROCESS); {AGAINST_SECONDS}"
)
DEVICE_FILES_ADVICE = (
    "where nothing has used CUDA since boot, run `nvidia-modprobe -u -c 0` first: the trial process may not make the "
    "device files"
)
DESCRIPTORS_ADVICE = "raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system')"
COLLATE_ADVICE = "pass collate_fn=, or the loader that your library makes: tune(loader, model)"
NOT_MOVED_ADVICE = "a train_step gets the batch as the loader gives it, and moves it to the device as your loop does"
ENDS_TRAINING = "; training would fail there too: fix that sample, or leave it out of the dataset"
IN_FORKED = "re-initialize cuda in forked"
_TEXTS: tuple[tuple[str, FailureKind, str], ...] = (
    (r"out of shared memory|bus error|to write to file </torch_", "shared_memory", SHM_ADVICE),
    (r"to open shared memory|left on device: '/dev/shm", "shared_memory", SHM_ADVICE),
    (r"no space left on device: '", "user_exception", "a disk is full, such as that of the temporary folder"),
    (r"no space left on device", "shared_memory", SHM_ADVICE),
    (r"too many open files|received 0 items of ancdata", "descriptors", DESCRIPTORS_ADVICE),
    # the first is torch's, of whatever device; the last cuBLAS's and cuDNN's
    (r"outofmemoryerror|cuda (error: )?out of memory|status_alloc_failed", "device_memory", DEVICE_MEMORY_ADVICE),
    (r"busy or unavailable", "user_exception", DEVICE_TAKEN_ADVICE),
    (r"cuda unknown error|no cuda-capable device|no cuda gpus", "user_exception", DEVICE_FILES_ADVICE),
    (r"out of memory|can(not|'t) allocate memory", "out_of_memory", MEMORY_ADVICE),
    (r"killed by signal: killed", "oom_killed", f"a worker {KILLED}"),
    (IN_FORKED, "user_exception", "the dataset uses CUDA: use 0 workers or start method 'spawn'"),
    (r"can(not|'t) pickle", "pickling", "make the named object picklable or use the 'fork' start method"),
    (r"can't get attribute", "pickling", "define the class in a module instead of a notebook cell or __main__"),
    (r"expected all tensors to be on the same device", "user_exception", NOT_MOVED_ADVICE),
    (r"input type \((?!torch\.cuda)\S+\) and weight type \(torch\.cuda", "user_exception", NOT_MOVED_ADVICE),
    (r"default_collate: batch must|stack expects each tensor|each element in list", "user_exception", COLLATE_ADVICE),
    (r"exited unexpectedly|killed by signal", "crashed", "a worker died; run with 0 workers to see where"),
)
"""What torch, Python and the kernel print, most specific first. The first text that is found decides."""
LOST_DEVICE = re.compile(r"(CUDA|CUDA driver|HIP|cuDNN) error|Triton Error \[|AcceleratorError")
"""In what torch, its libraries and Triton say where a kernel failed."""
PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
OUR_FRAMES = re.compile(rf'^ *File "{re.escape(PACKAGE)}(?!demo)[^\n]*\n(?: {{4,}}[^\n]*\n)*', re.MULTILINE)
"""Frames of this package, but for those of the demo's own job; a worker's traceback comes as a text, too."""


class Raised(Exception):  # noqa: N818 - it stands for an error of the user's, and is none
    """What the samples of a batch raised, in the place of that batch, from a worker too.

    `keys` are of the samples that raise, alone or together; a stream has none. `writes` is whether they wrote to a file that
    bursts do not change.
    """

    def __init__(self, failure: Failure, keys: tuple[Any, ...], writes: bool) -> None:
        super().__init__(failure, keys, writes)
        self.failure, self.keys, self.writes = failure, keys, writes

    @classmethod
    def of(cls, error: BaseException, name: str, keys: Sequence[Any] = ()) -> Raised:
        """What takes the place of a batch; an error that depends on the workers, such as a lack of memory, is raised itself."""
        if not is_of_user(error):
            raise error
        failure, path = failure_of(error, "batches"), refused_path(error)
        message = f"{name} raises {failure.message}" if path is None else sample_writes(name, path)
        return cls(replace(failure, message=message), tuple(keys), path is not None)

    def is_of_workers(self, read_private: Callable[[], DataSide]) -> bool:
        """Whether the samples do not raise where this process reads them, as far as they are known."""
        if self.writes:
            return False
        data, keys = read_private(), list(self.keys)
        dataset = data.dataset
        try:
            if keys and data.is_batched:
                data.collate(dataset.__getitems__(keys) if data.has_batched_fetch else [dataset[key] for key in keys])
            elif keys:
                data.collate(dataset[keys[0]])
        except (Exception, SystemExit):
            return False
        return True


def checked(batch: Any) -> Any:
    """The batch; raises what came in its place."""
    if isinstance(batch, Raised):
        raise batch
    return batch


def is_of_user(error: BaseException) -> bool:
    """Whether a sample or the step may be at fault: not a lack of memory, say, which depends on the workers."""
    kind, text, _ = _diagnosis(error)
    return kind == "user_exception" and IN_FORKED not in text.lower()


def failure_of(error: BaseException, phase: FailurePhase, deaths: Iterable[str] = ()) -> Failure:
    """The failure that an exception means; `deaths` is what `deaths_of` tells of workers."""
    kind, text, advice = _diagnosis(error, deaths)
    return Failure(
        kind=kind,
        phase=phase,
        message=first_sentence(text) + (f" ({advice})" if advice else ""),
        retryable=kind in ("crashed", "descriptors"),
        traceback=user_traceback(error),
    )


def needs_new_process(failure: Failure) -> bool:
    return failure.kind == "device_memory" or has_lost_device(failure)


def has_lost_device(failure: Failure) -> bool:
    """Whether a kernel failed, after which every call of that process to the device fails."""
    return LOST_DEVICE.search(failure.message) is not None


def deaths_of(workers: Iterable[BaseProcess]) -> list[str]:
    """Which of these workers were killed by a signal, in torch's words.

    Torch knows the signal of its own children alone, so not where a fork server started them; and it raises it in the midst
    of anything, where it may be lost.
    """
    return [
        f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.strsignal(-worker.exitcode)}"
        for worker in workers
        if worker.exitcode is not None and worker.exitcode < 0
    ]


def _diagnosis(error: BaseException, deaths: Iterable[str] = ()) -> tuple[FailureKind, str, str]:
    """Kind, text and advice. Torch reports a dead worker as "exited unexpectedly" and gives the signal as the cause."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    texts = [*(f"{type(each).__name__}: {each}" for each in causes), *deaths]
    if isinstance(error, MemoryError):
        return "out_of_memory", texts[0], MEMORY_ADVICE
    for pattern, kind, advice in _TEXTS:
        for text in texts:
            if re.search(pattern, text, re.IGNORECASE):
                return kind, text, advice
    return "user_exception", texts[0], ""


def first_sentence(text: str, limit: int = 600) -> str:
    """The line that says what happened, also where torch has wrapped a worker's exception in the text of its traceback."""
    lines = [line for line in text.splitlines() if line.strip()] or ["unknown error"]
    if "Caught " in lines[0] and "Original Traceback" in text:
        last_frame = max((at for at, line in enumerate(lines) if line.startswith("  File ")), default=0)
        lines = [line for line in lines[last_frame + 1 :] if not line.startswith(" ")] or lines
    line = lines[0].strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def user_traceback(error: BaseException) -> str:
    """The traceback without frames of this package."""
    return OUR_FRAMES.sub("", "".join(traceback.format_exception(error)))


def failure_of_death(exit_code: int | None, phase: FailurePhase, last_words: str) -> Failure:
    """The failure that the death of the trial process means.

    The exit code is negative for a signal, and None when it is not known. `last_words` is the end of what the process wrote.
    """
    kind: FailureKind = "crashed"
    message = f"the trial process exited with status {exit_code}"
    if exit_code == -signal.SIGKILL:
        kind, message = "oom_killed", f"the trial process {KILLED}"
    elif exit_code == -signal.SIGBUS:
        kind, message = "shared_memory", f"bus error: {SHM_ADVICE}"
    elif exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        message = f"the trial process died of {name} in user code or a native library"
    words = last_words.strip() or None
    return Failure(kind=kind, phase=phase, message=message, retryable=kind == "crashed", traceback=words)
