"""From what was seen (an exception, an exit status, a text on stderr) to a `Failure` that says what to do next."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, FailureKind, FailurePhase

AGAINST_SECONDS = "train_step=0.05, the seconds of one step, tunes the loader against those"
DEVICE_MEMORY_ADVICE = (
    f"use a smaller batch, or free what else is on the device: models of this process count too; {AGAINST_SECONDS}"
)
DEVICE_TAKEN_ADVICE = f"another process has the GPU, and it takes one at a time (EXCLUSIVE_PROCESS); {AGAINST_SECONDS}"
DESCRIPTORS_ADVICE = "raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system')"
COLLATE_ADVICE = "pass collate_fn=, or the loader that your library makes: tune(loader, model)"
NOT_MOVED_ADVICE = "a train_step gets the batch as the loader gives it, and moves it to the device as your loop does"
IN_FORKED = "re-initialize cuda in forked"
PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
"""Where this package lies: its frames are left out of tracebacks, but for those of the demo's own job."""
# What C++ prints of an exception that nobody catches, as torch's where memory is freed after a kernel has failed.
CPP_EXCEPTION = re.compile(r"^ *what\(\): *(.+)", re.MULTILINE)
# What torch, Python and the kernel print, most specific first. The first text found decides.
_TEXTS: tuple[tuple[str, FailureKind, str], ...] = (
    ("out of shared memory", "shared_memory", "raise /dev/shm (docker run --shm-size=8g) or use fewer workers"),
    ("bus error", "shared_memory", "raise /dev/shm (docker run --shm-size=8g) or use fewer workers"),
    ("unable to write to file </torch_", "shared_memory", "raise /dev/shm (docker run --shm-size=8g)"),
    ("unable to open shared memory", "shared_memory", "raise /dev/shm (docker run --shm-size=8g)"),
    ("no space left on device: '/dev/shm", "shared_memory", "raise /dev/shm (docker run --shm-size=8g)"),
    ("no space left on device: '", "user_exception", "a disk is full, such as that of the temporary folder"),
    ("no space left on device", "shared_memory", "raise /dev/shm (docker run --shm-size=8g) or use fewer workers"),
    ("too many open files", "descriptors", DESCRIPTORS_ADVICE),
    ("received 0 items of ancdata", "descriptors", DESCRIPTORS_ADVICE),
    ("outofmemoryerror", "device_memory", DEVICE_MEMORY_ADVICE),  # torch's, of whatever device and allocator
    ("cuda out of memory", "device_memory", DEVICE_MEMORY_ADVICE),
    ("cuda error: out of memory", "device_memory", DEVICE_MEMORY_ADVICE),
    ("status_alloc_failed", "device_memory", DEVICE_MEMORY_ADVICE),  # cuBLAS and cuDNN
    ("busy or unavailable", "user_exception", DEVICE_TAKEN_ADVICE),
    ("out of memory", "out_of_memory", "use a smaller batch or fewer workers"),
    ("can't allocate memory", "out_of_memory", "use a smaller batch or fewer workers"),
    ("cannot allocate memory", "out_of_memory", "use a smaller batch or fewer workers"),
    ("killed by signal: killed", "oom_killed", "a worker was killed, most likely by the OOM killer: use fewer workers"),
    (IN_FORKED, "user_exception", "the dataset uses CUDA: use 0 workers or start method 'spawn'"),
    ("can't pickle", "pickling", "make the named object picklable or use the 'fork' start method"),
    ("cannot pickle", "pickling", "make the named object picklable or use the 'fork' start method"),
    ("can't get attribute", "pickling", "define the class in a module instead of a notebook cell or __main__"),
    ("exited unexpectedly", "crashed", "a worker died; run with 0 workers to see where"),
    ("expected all tensors to be on the same device", "user_exception", NOT_MOVED_ADVICE),
    ("default_collate: batch must contain", "user_exception", COLLATE_ADVICE),
    ("stack expects each tensor to be equal size", "user_exception", COLLATE_ADVICE),
    ("each element in list of batch should be of equal size", "user_exception", COLLATE_ADVICE),
    ("killed by signal", "crashed", "a worker died; run with 0 workers to see where"),
)


def is_of_user(error: Exception) -> bool:
    """Whether a sample or the step may be at fault: not a lack of memory, say, which depends on the workers."""
    kind, text, _ = _diagnosis(error)
    return kind == "user_exception" and IN_FORKED not in text.lower()


def failure_of(error: BaseException, phase: FailurePhase, deaths: Iterable[str] = ()) -> Failure:
    """The failure that an exception in the probe process means.

    Args:
        error: what was raised.
        phase: where.
        deaths: what is known of workers that died, as `deaths_of` tells it.
    """
    kind, text, advice = _diagnosis(error, deaths)
    return Failure(
        kind=kind,
        phase=phase,
        message=_first_sentence(text) + (f" ({advice})" if advice else ""),
        retryable=kind in ("crashed", "descriptors"),
        traceback=user_traceback(error),
    )


def failure_of_reading(error: BaseException) -> Failure:
    """The failure of a workload that was pickled, and cannot be unpickled in the probe process."""
    text = _first_sentence(f"{type(error).__name__}: {error}")
    return Failure(kind="pickling", phase="start", message=text, traceback=user_traceback(error))


def needs_new_process(failure: Failure) -> bool:
    """Whether a kernel failed, after which every CUDA call of that process fails, or its device is full."""
    return failure.kind == "device_memory" or "CUDA error" in failure.message


def deaths_of(workers: Iterable[BaseProcess]) -> list[str]:
    """Which of these workers were killed by a signal, in torch's words.

    Torch knows the signal of its own children alone, so not where a fork server started them; and it tells it by raising
    in the midst of anything, where it may be lost. Exit codes are always there.
    """
    codes = [(worker.pid, worker.exitcode) for worker in workers]
    return [
        f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
        for pid, code in codes
        if code and code < 0
    ]


def _diagnosis(error: BaseException, deaths: Iterable[str] = ()) -> tuple[FailureKind, str, str]:
    """Kind, text and advice. Torch reports a dead worker as "exited unexpectedly" and gives the signal as the cause."""
    texts = [*(f"{type(each).__name__}: {each}" for each in _with_causes(error)), *deaths]
    if isinstance(error, MemoryError):
        return "out_of_memory", texts[0], "use a smaller batch or fewer workers"
    for needle, kind, advice in _TEXTS:
        for text in texts:
            if needle in text.lower():
                return kind, text, advice
    return "user_exception", texts[0], ""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_sentence(text: str, limit: int = 600) -> str:
    """The line that says what happened: torch wraps a worker's exception in its whole traceback, whose last line it is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "unknown error"
    wrapped = "Caught " in lines[0] and "Original Traceback" in text
    line = next((line for line in reversed(lines) if not line.startswith("^")), lines[0]) if wrapped else lines[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def user_traceback(error: BaseException) -> str:
    """The traceback as the user would have seen it without us: frames of this package are left out."""
    return _without_our_lines("".join(traceback.format_exception(error)))


def _without_our_lines(text: str) -> str:
    """A frame is a `File` line and the deeper indented lines after it; a worker's traceback comes as such a text, too."""
    kept: list[str] = []
    ours = False
    for line in text.splitlines(keepends=True):
        head = re.match(r' *File "(?P<file>[^"]+)", line \d+', line)
        ours = _is_ours(head["file"]) if head else ours and line.startswith("    ")
        if not ours:
            kept.append(line)
    return "".join(kept)


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) and not file.startswith(f"{PACKAGE}demo")


def failure_of_death(exit_code: int | None, phase: FailurePhase, stderr_tail: str) -> Failure:
    """The failure that the death of the probe process itself means, from its exit status and its last words.

    Args:
        exit_code: as `subprocess.Popen.returncode`: negative for a signal; None when it is not known.
        phase: what the process had last said it was doing.
        stderr_tail: the last lines it wrote.
    """
    if exit_code == -signal.SIGKILL:
        kind: FailureKind = "oom_killed"
        message = "the probe process was killed (SIGKILL), most likely by the OOM killer: use fewer workers"
    elif exit_code == -signal.SIGBUS:
        kind, message = "shared_memory", "bus error: /dev/shm is full (docker run --shm-size=8g)"
    elif exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        said = CPP_EXCEPTION.search(stderr_tail)
        why = f": {said[1]}" if said else ""
        kind, message = "crashed", f"the probe process died of {name} in user code or a native library{why}"
    else:
        kind, message = "crashed", f"the probe process exited with status {exit_code}"
    tail = stderr_tail.strip()
    return Failure(kind=kind, phase=phase, message=message, retryable=kind == "crashed", traceback=tail or None)


def failure_of_memory_guard(config: LoaderConfig, budget_bytes: int | None) -> Failure:
    """The failure of a burst that was stopped because it took too much memory."""
    return Failure(
        kind="memory_guard",
        phase="batches",
        message=f"{config} took more than 90 % of the memory budget of {(budget_bytes or 0) / 2**20:.0f} MiB "
        "and was stopped; use fewer workers or smaller batches",
    )
