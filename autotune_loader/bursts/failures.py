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
SHM_ADVICE = "raise /dev/shm (docker run --shm-size=8g) or use fewer workers"
MEMORY_ADVICE = "use a smaller batch or fewer workers"
_SHM = (
    "out of shared memory", "bus error", "unable to write to file </torch_", "unable to open shared memory",
    "no space left on device: '/dev/shm",
)  # fmt: skip
_DEVICE = ("outofmemoryerror", "cuda out of memory", "cuda error: out of memory", "status_alloc_failed")
"""The first is torch's, of whatever device; the last cuBLAS's and cuDNN's."""
_COLLATE = (
    "default_collate: batch must",
    "stack expects each tensor to be equal",
    "each element in list of batch should",
)
_TEXTS: tuple[tuple[tuple[str, ...], FailureKind, str], ...] = (
    (_SHM, "shared_memory", SHM_ADVICE),
    (("no space left on device: '",), "user_exception", "a disk is full, such as that of the temporary folder"),
    (("no space left on device",), "shared_memory", SHM_ADVICE),
    (("too many open files", "received 0 items of ancdata"), "descriptors", DESCRIPTORS_ADVICE),
    (_DEVICE, "device_memory", DEVICE_MEMORY_ADVICE),
    (("busy or unavailable",), "user_exception", DEVICE_TAKEN_ADVICE),
    (("out of memory", "can't allocate memory", "cannot allocate memory"), "out_of_memory", MEMORY_ADVICE),
    (
        ("killed by signal: killed",),
        "oom_killed",
        "a worker was killed, most likely by the OOM killer: use fewer workers",
    ),
    ((IN_FORKED,), "user_exception", "the dataset uses CUDA: use 0 workers or start method 'spawn'"),
    (("can't pickle", "cannot pickle"), "pickling", "make the named object picklable or use the 'fork' start method"),
    (("can't get attribute",), "pickling", "define the class in a module instead of a notebook cell or __main__"),
    (("expected all tensors to be on the same device",), "user_exception", NOT_MOVED_ADVICE),
    (_COLLATE, "user_exception", COLLATE_ADVICE),
    (("exited unexpectedly", "killed by signal"), "crashed", "a worker died; run with 0 workers to see where"),
)
"""What torch, Python and the kernel print, most specific first. The first text that is found decides."""


def is_of_user(error: BaseException) -> bool:
    """Whether a sample or the step may be at fault: not a lack of memory, say, which depends on the workers."""
    kind, text, _ = _diagnosis(error)
    return kind == "user_exception" and IN_FORKED not in text.lower()


def failure_of(error: BaseException, phase: FailurePhase, deaths: Iterable[str] = ()) -> Failure:
    """The failure that an exception means.

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
        return "out_of_memory", texts[0], MEMORY_ADVICE
    for needles, kind, advice in _TEXTS:
        for text in texts:
            if any(needle in text.lower() for needle in needles):
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


def failure_of_death(exit_code: int | None, phase: FailurePhase, last_words: str) -> Failure:
    """The failure that the death of the process of the bursts means.

    Args:
        exit_code: as `subprocess.Popen.returncode`: negative for a signal; None when it is not known.
        phase: what the process had last said it was doing.
        last_words: the end of what it wrote.
    """
    kind: FailureKind = "crashed"
    message = f"the process of the bursts exited with status {exit_code}"
    if exit_code == -signal.SIGKILL:
        kind, message = (
            "oom_killed",
            "the process of the bursts was killed, most likely by the OOM killer: use fewer workers",
        )
    elif exit_code == -signal.SIGBUS:
        kind, message = "shared_memory", f"bus error: {SHM_ADVICE}"
    elif exit_code is not None and exit_code < 0:
        said = CPP_EXCEPTION.search(last_words)
        name, why = signal.Signals(-exit_code).name, f": {said[1]}" if said else ""
        message = f"the process of the bursts died of {name} in user code or a native library{why}"
    traceback = last_words.strip() or None
    return Failure(kind=kind, phase=phase, message=message, retryable=kind == "crashed", traceback=traceback)


def failure_of_memory_guard(config: LoaderConfig, budget_bytes: int | None) -> Failure:
    """The failure of a burst that was stopped because it took too much memory."""
    limit = f"90 % of the memory budget of {(budget_bytes or 0) / 2**20:.0f} MiB"
    message = f"{config} took more than {limit} and was stopped; {MEMORY_ADVICE}"
    return Failure(kind="memory_guard", phase="batches", message=message)
