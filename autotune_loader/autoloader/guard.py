"""Whether a fresh process would run the training again: spawned, or from a fork server, it imports the script anew."""

from __future__ import annotations

import ast
import functools
import multiprocessing.process
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def unguarded_line() -> int | None:
    """The line at which the script is now, if importing the script would come there again: no `__main__` guard is around it.

    None where nothing would run again: the line is guarded, or `multiprocessing` imports no script here (`python -c`, a
    notebook, `python -m package`). 0 where that cannot be told: the script has ended, or its file cannot be read.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        return 0  # this process is importing the script itself, and may start none
    main: Any = sys.modules["__main__"]
    name, path = getattr(getattr(main, "__spec__", None), "name", None), getattr(main, "__file__", None)
    if main.__name__ != "__main__" or (path is None if name is None else f".{name}".endswith(".__main__")):
        return None  # what a process has imported as `__mp_main__` has come to its end there
    line = 0
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:  # the outermost one counts: `exec` makes others
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
        frame = frame.f_back
    try:
        guarded = _guarded(path or "", Path(path or "").stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return 0
    return None if any(line in each for each in guarded) else line


@functools.lru_cache(maxsize=1)
def _guarded(path: str, _changed_at: int) -> list[range]:
    """Lines of a script in bodies of its guards."""
    tree = ast.parse(Path(path).read_bytes())
    bodies = [each.body for each in _statements(tree) if isinstance(each, ast.If) and _is_guard(each.test)]
    return [range(body[0].lineno, (body[-1].end_lineno or 0) + 1) for body in bodies]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those that run as a module is imported."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield each
            if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _statements(each)


def _is_guard(test: ast.expr) -> bool:
    """Whether this holds in the script alone: `__name__ == "__main__"`, also with `and`."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(map(_is_guard, test.values))
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")
