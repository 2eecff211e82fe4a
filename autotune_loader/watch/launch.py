"""Runs a script or a module as `python train.py` or `python -m train` would, with its loaders looked at.

    sys.argv, sys.path[0], __main__ ── the script ── its own exit code, signal or traceback ── the report

What the script sees of us is an environment variable for its children, a folder in PYTHONPATH, and frames below its own.
"""

from __future__ import annotations

import atexit
import builtins
import hashlib
import os
import re
import runpy
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.scripts.hook import End, Hook, active
from autotune_loader.scripts.plan import Plan
from autotune_loader.values.lines import is_ours

WAITS_TOO_LONG = 4
"""Exit code where the loop waited for longer than `--fail-if-wait` allows."""
CANNOT_OPEN = 2
"""Exit code of Python for a script that is not there."""
# As `traceback` prints it.
FRAME = re.compile(r'  File "([^"\n]+)", line \d+, in [^\n]*\n(?:    [^\n]*\n)*')


def launch(plan: Plan, target: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module, to its end; returns only where it ended well, and raises what it raised.

    Raises:
        SystemExit: the script's own; or nothing of that name is there; or the loop waited for too long.
    """
    try:
        _run(plan, target, arguments, is_module=is_module)
    except BaseException:
        _hide_our_frames()
        raise


def _run(plan: Plan, target: str, arguments: Sequence[str], *, is_module: bool) -> None:
    main, code = (_module if is_module else _script)(target, arguments)
    hook = Hook(replace(plan, folder=_folder(), pid=os.getpid()))
    end = End(hook)
    atexit.register(end)
    hook.plan.hand_on()
    active.clear()  # a run within a run reports for itself
    hook.install()
    _leave_to_the_script(sys.path[0])
    # The second name is the one by which spawned processes send objects of its classes.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _tell_before_a_sudden_end(end)
    try:
        exec(code, vars(main))  # noqa: S102 - the script
    except (KeyboardInterrupt, SystemExit) as error:
        if hook.has_batches and hook.session.stopped is not None:
            return  # it was we who ended it
        if isinstance(error, KeyboardInterrupt):
            end.is_interrupted = not is_module
            raise
        if error.code not in (None, 0):
            raise
    if hook.has_batches and hook.session.is_waiting_too_long:
        raise SystemExit(WAITS_TOO_LONG)


def _folder() -> str:
    """Where the processes of this script leave notes for each other, made by the first; the ranks of a launcher share one."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    is_rank = rank_of_environment()[1] > 1
    job = "-".join(os.environ.get(name, "") for name in names) if is_rank else secrets.token_hex()
    return os.path.join(  # noqa: PTH118
        tempfile.gettempdir(), f"autotune-loader-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
    )


def _script(path: str, arguments: Sequence[str]) -> tuple[ModuleType, CodeType]:
    """`__main__` and the code of a file, as Python sets them up."""
    # As Python itself does, dots and all; the current folder may be gone.
    absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH117, PTH118
    try:
        source = Path(absolute).read_bytes()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {absolute!r}: {why}", file=sys.stderr)
        raise SystemExit(CANNOT_OPEN) from None
    sys.argv[:] = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(absolute))  # noqa: PTH120
    main = _new_main(SourceFileLoader("__main__", absolute), absolute)
    return main, compile(source, absolute, "exec", dont_inherit=True)


def _module(name: str, arguments: Sequence[str]) -> tuple[ModuleType, CodeType]:
    """`__main__` and the code of a module or package, as `python -m` sets them up, and its words where there is none."""
    sys.argv[:] = ["-m", *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # noqa: PTH109
    find: Any = vars(runpy)["_get_module_details"]
    try:
        _, spec, code = find(name, _NotThereError)
    except _NotThereError as error:
        raise SystemExit(f"{sys.executable}: {error}") from None
    sys.argv[0] = spec.origin
    main = _new_main(spec.loader, spec.origin)
    vars(main).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return main, code


class _NotThereError(Exception):
    """There is no such module, or it cannot be run."""


def _new_main(loader: Any, file: str) -> ModuleType:
    main = ModuleType("__main__")
    more = {"__file__": file, "__loader__": loader, "__cached__": None, "__annotations__": {}, "__builtins__": builtins}
    vars(main).update(more)
    return main


def _leave_to_the_script(folder: str) -> None:
    """Let the script import a module of its own that has the name of one that only we have imported, such as statistics."""
    known = list(sys.modules)
    for name in known[known.index("autotune_loader") + 1 :]:  # in the order in which they were imported
        places = [os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py")]  # noqa: PTH118
        own = next(filter(os.path.isfile, places), None)
        if own is not None and getattr(sys.modules[name], "__file__", None) != own:
            del sys.modules[name]


def _hide_our_frames() -> None:
    """An exception that ends the script is shown as under plain Python, by the script's own hook where it has set one."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> Any:
        seen, pending = set[int](), [error]
        while pending:
            each = pending.pop()
            seen.add(id(each))
            each.__traceback__ = _without_ours(each.__traceback__)
            if each.args and isinstance(text := each.args[0], str) and "Original Traceback" in text:  # from a worker
                kept = FRAME.sub(lambda found: "" if is_ours(found[1]) else found[0], text)
                each.args = (type(text)(kept), *each.args[1:])
            pending += [other for other in (each.__cause__, each.__context__) if other and id(other) not in seen]
        return shown(kind, error, error.__traceback__)

    sys.excepthook = show


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package and of what started it."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    launched = [place for place, each in enumerate(frames) if each.tb_frame.f_code is launch.__code__]
    result = None
    for each in reversed(frames[launched[-1] + 1 if launched else 0 :]):
        if not is_ours(each.tb_frame.f_code.co_filename):
            result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def _tell_before_a_sudden_end(end: End) -> None:
    """`os._exit` runs nothing of what is meant to run at the end."""
    leave = os._exit

    def leave_now(status: int) -> Any:
        end(f"The script ended by os._exit({status}).")
        leave(status)

    os._exit = leave_now
