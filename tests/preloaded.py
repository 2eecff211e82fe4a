"""A Python that has imported torch and the package once, and forks for each script that is to run:
most of a short script's time is its imports.

    test                          preloaded Python              script
    python.start("job.py") ─────► fork ───────────────────────► `__main__`, with its own folder,
    run.wait() ◄───────────────── exit status ◄───────────────  environment, output, ordinary end

A probe process may be such a script, too (`Forks.Popen`): its start is most of a short `tune()`.
With `probes=True` a script has a copy of the preloaded Python for its own probes. What a test shows
of a fresh interpreter (its start, its memory, what it imports) is not for this. The parent has run
nothing in torch, so that what it forks may. `multiprocessing.forkserver` is no
replacement: its processes end by `os._exit`, it is one a program, and nobody can fork it again.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
# What nearly every script imports, its first optimizer, and tune() when it is called.
MODULES = (
    "torch", "torch._dynamo", "torch.distributed.launcher.api", "cloudpickle", "pandas",
    "optuna.storages.journal", "autotune_loader.tuning.tune", "autotune_loader.tuning.study",
)  # fmt: skip
STARTS_PROBES = "autotune_loader.bursts.parent"
NOTHING: Mapping[str, str] = {}
MOST_DESCRIPTORS, MOST_BYTES = 10, 1 << 20
"""Of a request: its descriptors begin with the output and the pipe for the exit status."""


class Run:
    """A script that was started: `subprocess.Popen` for tests, with both streams in one file."""

    def __init__(self, pid: int, report: int, stream: Any) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.output = ""
        self._report, self._stream = report, stream

    def poll(self) -> int | None:
        return self.returncode if self._ends_within(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ends_within(timeout):
            self._read()
            raise subprocess.TimeoutExpired("a script", timeout or 0, self.output.encode())
        assert self.returncode is not None
        return self.returncode

    def _ends_within(self, seconds: float | None) -> bool:
        if self.returncode is None and select.select([self._report], [], [], seconds)[0]:
            self.returncode = json.loads(os.read(self._report, 32))
            self._read()
            os.close(self._report)
            self._stream.close()
        return self.returncode is not None

    def _read(self) -> None:
        self._stream.seek(0)
        self.output = self._stream.read()


class Forks:
    """Asks the process at the other end of a connection (`serve`) to fork.

    Args:
        connection: to it.
        environ: what all of its forks have besides.
    """

    def __init__(self, connection: socket.socket, environ: Mapping[str, str] | None = None) -> None:
        self._connection = connection
        self._environ = dict(environ or {})
        self._started = list[Run]()

    def start(
        self, *argv: str, folder: Path, environ: Mapping[str, str] = NOTHING, probes: bool = False
    ) -> Run:
        """Run a script with its arguments in a folder, in a session of its own."""
        stream = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - as long as the run
        request = {"argv": argv, "folder": str(folder), "probes": probes}
        environ = {**os.environ, **self._environ, **environ}
        return self._fork({**request, "environ": environ}, stream, ())

    def ran(
        self, text: str, *argv: str, folder: Path, code: int = 0, timeout: float = 100, **how: Any
    ) -> str:
        """What a script of this text has printed, which ended with this code."""
        (folder / "train.py").write_text(text, encoding="utf-8")
        run = self.start("train.py", *argv, folder=folder, **how)
        assert run.wait(timeout) == code, run.output
        return run.output

    def Popen(self, command: Sequence[str], **how: Any) -> Run:  # noqa: N802
        """In place of `subprocess.Popen`, for `python ... -c CODE` whose output is a file."""
        output = os.dup(how["stdout"].fileno())
        stream = os.fdopen(output, "r+", encoding="utf-8", errors="replace")
        own = f"die_with_parent({os.getpid()})"  # its parent is another one
        request = {"argv": ["-c"], "code": command[-1].replace(own, "die_with_parent()")}
        request |= {"folder": os.getcwd(), "environ": dict(how["env"])}  # noqa: PTH109
        request["descriptors"] = how["pass_fds"]
        return self._fork(request, stream, how["pass_fds"])

    def in_place_of_subprocess(self) -> types.SimpleNamespace:
        """What `STARTS_PROBES` is given as its module `subprocess`."""
        return types.SimpleNamespace(**{**vars(subprocess), "Popen": self.Popen})

    def _fork(self, request: dict[str, Any], stream: Any, more: Sequence[int]) -> Run:
        report, reported = os.pipe()
        message, descriptors = json.dumps(request).encode(), [stream.fileno(), reported, *more]
        socket.send_fds(self._connection, [message], descriptors)
        os.close(reported)
        self._started.append(Run(int(self._connection.recv(32)), report, stream))
        return self._started[-1]


class PreloadedPython(Forks):
    """The parent of all scripts.

    Args:
        environ: what its environment, and that of its scripts, has besides.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a request is a message
        super().__init__(ours, environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *MODULES],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self._environ},
            )

    def close(self) -> None:
        """End it and every script that still runs."""
        # Also where a process that a test has forked holds it, too.
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._process.wait(timeout=30)
        for run in self._started:
            run.wait(timeout=0)


def pidfd(pid: int) -> int:
    """As the package has it, which is imported by then: Pythons of uv and conda lack the call."""
    return int(sys.modules["autotune_loader.machine.kernel"].pidfd(pid))


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request until the connection ends; return it in the forked process alone."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([connection.fileno(), *running], [], [])
        for ended in [each for each in ready if each in running]:
            pid, report = running.pop(ended)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(report, json.dumps(status).encode())
            os.close(report)
            os.close(ended)
        if connection.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            end(list(running.values()))
        request = json.loads(message)
        stream, report, *more = descriptors
        pid = os.fork()
        if pid == 0:
            os.setsid()  # before anybody knows its number, and may send a signal to its group
            connection.send(str(os.getpid()).encode())
            connection.close()
            for descriptor in [report, *running, *(other for _, other in running.values())]:
                os.close(descriptor)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            os.close(stream)
            place(more, request.pop("descriptors", ()))
            return request
        for descriptor in (stream, *more):
            os.close(descriptor)
        running[pidfd(pid)] = (pid, report)


def place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they had where they come from."""
    free = 1 + max([*received, *numbers], default=0)
    beyond = [fcntl.fcntl(each, fcntl.F_DUPFD, free) for each in received]
    for each in received:
        os.close(each)
    for each, number in zip(beyond, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def end(running: Sequence[tuple[int, int]]) -> NoReturn:
    for pid, report in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.write(report, json.dumps(-signal.SIGKILL).encode())
    os._exit(0)


def become(
    argv: Sequence[str],
    folder: str,
    environ: dict[str, str],
    code: str | None = None,
    probes: bool = False,
) -> None:
    """Be the process in which a fresh Python runs the script, or this code."""
    if probes:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        if os.fork() == 0:  # ends with the script, whose end of the connection is the only one
            ours.close()
            become(**serve(theirs))
            return
        theirs.close()
        sys.modules[STARTS_PROBES].subprocess = Forks(ours).in_place_of_subprocess()  # type: ignore[attr-defined]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # found out anew, as by a fresh Python
    if "SIMULATED" in environ:  # read where torch is imported (tests/support/accelerator/device.py)
        sys.modules["torch"].sim.configure(**json.loads(environ["SIMULATED"]))
    sys.argv[:] = argv
    if code is not None:
        exec(code, vars(sys.modules["__main__"]))
        return
    path = os.path.abspath(argv[0])  # noqa: PTH100 - as Python itself does
    sys.path[0] = os.path.dirname(path)  # noqa: PTH120
    if "OMP_NUM_THREADS" in environ:
        sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))
    main = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    gc.freeze()  # or each script goes through what is imported at its end, for most of a second
    become(**serve(socket.socket(fileno=int(sys.argv[1]))))
