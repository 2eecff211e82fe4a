"""Runs a script or a module as `python train.py` or `python -m train` would, with its loaders looked at.

    sys.argv, sys.path[0], __main__ ── the script ── its own exit code, signal or traceback ── the report

What the script sees of us is an environment variable for its children, a folder in PYTHONPATH, and frames below its own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import pkgutil
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune_loader.watch.hook import Hook, active
from autotune_loader.watch.run_plan import Plan, new_folder

WAITS_TOO_LONG = 4
"""Exit code where the loop waited for longer than `--fail-if-wait` allows."""
CANNOT_OPEN = 2
"""Exit code of Python for a script that is not there."""


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
    pid, is_by_sigint = os.getpid(), False
    plan = replace(plan, pid=pid, folder=new_folder(), script=shlex.join(["-m"] * is_module + [target, *arguments]))
    hook = Hook(plan)

    @atexit.register  # first, so that it is the last that happens
    def end() -> None:
        if os.getpid() == pid:
            _wait_for_processes()
            hook.tell()
            if is_by_sigint:
                _end_by_sigint()

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
    is_safe = getattr(sys.flags, "safe_path", False)
    # As Python itself does, dots and all; the current folder may be gone.
    absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH117, PTH118
    if pkgutil.get_importer(absolute) is not None:  # a zipapp or a folder
        sys.path[: 0 if is_safe else 1] = [absolute]
        return _new_main(), partial(_run_module, "__main__", alter_argv=False)
    try:
        source = Path(absolute).read_bytes()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {absolute!r}: {why}", file=sys.stderr)
        raise SystemExit(CANNOT_OPEN) from None
    if not is_safe:
        sys.path[0] = os.path.dirname(os.path.realpath(absolute))  # noqa: PTH120
    main = _new_main(__file__=absolute, __loader__=SourceFileLoader("__main__", absolute), __cached__=None)
    code = compile(source, absolute, "exec", dont_inherit=True)
    return main, lambda: exec(code, vars(main))  # noqa: S102 - the script


def _module(name: str) -> tuple[ModuleType, Callable[[], Any]]:
    """`__main__` and what runs a module or package, as `python -m` sets them up."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # noqa: PTH109
    return _new_main(), partial(_run_module, name)


def _run_module(name: str, *, alter_argv: bool = True) -> None:
    """What `python -m` itself calls, by this name since Python 2.5; it says where there is no such module."""
    vars(runpy)["_run_module_as_main"](name, alter_argv)


def _new_main(**known: Any) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins, **known)
    return main


def _wait_for_processes() -> None:
    """Those of multiprocessing, as it does itself at the end of a process: what they saw is told, too."""
    if (multiprocessing := sys.modules.get("multiprocessing.process")) is not None:
        for child in multiprocessing.active_children():
            if not child.daemon:
                child.join()


def _end_by_sigint() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
