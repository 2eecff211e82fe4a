"""What every test of a live loader leaves: nobody, and where it failed nothing that makes the next one fail."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from autotune_loader.live import workers

END_S = 5.0


def children_left() -> list[psutil.Process]:
    deadline = time.monotonic() + END_S
    while (left := _forked()) and time.monotonic() < deadline:
        gc.collect()  # an exception's frames may hold an iterator, torch's own, too
        time.sleep(0.02)
    return left


def _forked() -> list[psutil.Process]:
    """Those of `multiprocessing`, and workers that nobody asked for, which it does not know of."""
    multiprocessing.active_children()  # the dead are buried
    this = psutil.Process()
    return [each for each in this.children() if _command(each) == this.cmdline()]


def _command(process: psutil.Process) -> list[str] | None:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return None


@pytest.fixture
def close_pools() -> Callable[[], None]:
    """Ends the workers of every pool of this process, whoever still holds it: a failure's traceback does."""

    def close() -> None:
        for pool in list(workers._shielded):
            pool.close()
        for child in children_left():
            child.kill()
            child.wait()

    return close


@pytest.fixture(autouse=True)
def nobody_is_left(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close_pools: Callable[[], None]
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # no loader.json lies about
    failures = request.session.testsfailed
    yield
    if request.node.get_closest_marker("unit") is not None:
        return
    try:
        if request.session.testsfailed == failures:
            assert children_left() == []
    finally:
        close_pools()
