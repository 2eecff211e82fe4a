"""Runs a script or a module as `python train.py` or `python -m train` would, with its loaders looked at.

    sys.argv, sys.path[0], __main__ ── the script ── its own exit code, signal or traceback ── the report

What the script sees of us is an environment variable for its children, a folder in PYTHONPATH, and frames below its own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import pkgutil
import runpy
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune_loader.watch.hook import Hook, active
from autotune_loader.watch.run_plan import Plan

WAITS_TOO_LONG = 4
"""Exit code where the loop waited for longer than `--fail-if-wait` allows."""
LEAVES_WITHIN_S = 2.0
"""`os._exit` waits no longer for the report."""
CANNOT_OPEN = 2
"""Exit code of Python for a script that is not there."""
IS_SAFE = getattr(sys.flags, "safe_path", False)
"""`python -P`, since Python 3.11: nothing is put first in `sys.path`."""
RUN_MODULE: Callable[..., Any] = vars(runpy)["_run_module_as_main"]
"""What `python -m` itself calls, by this name since Python 2.5; it says where there is no such module."""


def launch(plan: Plan, target: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module, to its end; returns only where it ended well, and raises what it raised.

    Args:
        plan: what is to be done with its loaders.
        target: a file, a zipapp or a folder with a `__main__.py`, or a module's name.
        arguments: of the script.
        is_module: whether `target` is a module's name.

    Raises:
        SystemExit: the script's own; or nothing of that name is there; or the loop waited for too long.
    """
    sys.argv[:] = ["-m" if is_module else target, *arguments]
    main, run = _module(target) if is_module else _script(target)
    pid, is_by_sigint, is_told = os.getpid(), False, False
    script = shlex.join(["-m"] * is_module + [target, *arguments])
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"autotune-loader-{pid}-{os.urandom(8).hex()}")  # noqa: PTH118, S108
    plan = replace(plan, pid=pid, folder=folder, script=script)
    hook = Hook(plan)

    @atexit.register  # first, so that it is the last that happens
    def end() -> None:
        nonlocal is_told
        if os.getpid() == pid:
            for child in getattr(sys.modules.get("multiprocessing.process"), "active_children", list)():
                if not child.daemon:  # as multiprocessing does itself at the end: what they saw is told, too
                    child.join()
            is_told = True
            hook.tell()
            if is_by_sigint:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)

    leave = os._exit

    @functools.wraps(leave)
    def end_at_once(status: int) -> None:
        if os.getpid() == pid and hook.has_batches and not is_told:  # processes of its own have told at their end
            with contextlib.suppress(Exception):  # a thread, as it may be called because something hangs
                telling = threading.Thread(target=hook.tell, kwargs={"flushes": False}, daemon=True)
                telling.start()
                telling.join(LEAVES_WITHIN_S)
        leave(status)

    os._exit = end_at_once  # type: ignore[assignment]
    plan.hand_on()
    active.clear()  # a run within a run reports for itself
    hook.install()
    # The second name is the one by which spawned processes send objects of its classes.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        run()
    except KeyboardInterrupt:
        is_by_sigint = not is_module  # which Python ends otherwise
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    if hook.is_waiting_too_long:
        raise SystemExit(WAITS_TOO_LONG)


def _script(path: str) -> tuple[ModuleType, Callable[[], Any]]:
    """`__main__` and what runs a file, a zipapp or a folder, as Python sets them up."""
    # As Python itself does, dots and all; the current folder may be gone.
    absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH117, PTH118
    if pkgutil.get_importer(absolute) is not None:  # a zipapp or a folder
        sys.path[: 0 if IS_SAFE else 1] = [absolute]
        return _new_main(), partial(RUN_MODULE, "__main__", alter_argv=False)
    try:
        source = Path(absolute).read_bytes()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {absolute!r}: {why}", file=sys.stderr)
        raise SystemExit(CANNOT_OPEN) from None
    if not IS_SAFE:
        sys.path[0] = os.path.dirname(os.path.realpath(absolute))  # noqa: PTH120
    main = _new_main(__file__=absolute, __loader__=SourceFileLoader("__main__", absolute), __cached__=None)
    code = compile(source, absolute, "exec", dont_inherit=True)
    return main, lambda: exec(code, vars(main))  # noqa: S102 - the script


def _module(name: str) -> tuple[ModuleType, Callable[[], Any]]:
    """`__main__` and what runs a module or package, as `python -m` sets them up."""
    if not IS_SAFE:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    return _new_main(), partial(RUN_MODULE, name)


def _new_main(**known: Any) -> ModuleType:
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):  # from then on a module has none until it annotates
        main.__annotations__ = {}
    vars(main).update(__builtins__=builtins, **known)
    return main
