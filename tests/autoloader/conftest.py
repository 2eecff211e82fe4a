"""What every test of a live loader leaves: no process, and no thread."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune_loader.autoloader import channel

END_S = 5.0


def left(what: Callable[[], list[Any]]) -> list[Any]:
    deadline = time.monotonic() + END_S
    while (found := what()) and time.monotonic() < deadline:
        gc.collect()  # an exception's frames may hold an iterator, torch's own, too
        time.sleep(0.02)
    return found


def forked() -> list[psutil.Process]:
    """Those of `multiprocessing`, and workers that nobody asked for, which it does not know of."""
    multiprocessing.active_children()  # the dead are buried
    this, found = psutil.Process(), []
    for each in this.children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [each] if each.cmdline() == this.cmdline() else []
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # no loader.json lies about
    multiprocessing.set_start_method(None, force=True)  # not decided, as where a script begins
    failures, threads = request.session.testsfailed, threading.enumerate()
    yield
    if request.node.get_closest_marker("unit") is not None:
        return
    try:
        if request.session.testsfailed == failures:
            assert left(forked) == []
            assert (
                left(lambda: [each for each in threading.enumerate() if each not in threads]) == []
            )
    finally:
        for each in list(channel._living):  # whoever still holds it: a failure's traceback does
            each.hang_up()
        for child in left(forked):
            child.kill()
            child.wait()
