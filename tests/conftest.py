"""The kinds of tests (see CONTRIBUTING.md), and what every one of them may rely on.

A file's kind stands at its top (`pytestmark = pytest.mark.process`), or at the few tests that
differ from its others. No test is run twice, but for those few that say why at the test
(`pytest.mark.rerun("the reason")`): they are counted, and more than two reruns fail the whole run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.process
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preloaded import STARTS_PROBES, PreloadedPython

from tests.support.accelerator import compiler
from tests.support.accelerator.process import SimulatedPython

KINDS = ("process", "system", "acceptance", "gpu")
LONGEST_FIRST = ("acceptance", "system", "process", "gpu", "unit")
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
ASK_HOW_PROBES_BEGIN = ("test_cuda",)
MOST_NAMED = 10  # tests that may be run once more
MOST_RERUNS = 2  # of them in one run
TEMPORARY = "tests-"  # how the name of a run's temporary folder begins
MOST_SLEEP_S = 0.1  # a thread that is waited for in passing is no slow test

# Threads of a step wait for one another by spinning: two cost small models twice the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where the fork server is the default, each worker would import torch, for three seconds.
multiprocessing.set_forkserver_preload(["torch"])

with contextlib.suppress(ImportError):  # a bare machine with a GPU has none
    import hypothesis

    # A limit of seconds per example fails on a busy machine; the same examples in every run.
    hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("same")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A model that a test makes without a seed is the same in every run."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def preloaded() -> Iterator[PreloadedPython]:
    """Runs scripts without the time that importing torch takes."""
    python = PreloadedPython()
    yield python
    python.close()


@pytest.fixture(scope="module", autouse=True)
def warm_probe(request: pytest.FixtureRequest) -> Iterator[None]:
    """Probes begin in a Python that has imported torch, unless a test asks how they begin."""

    def popen(*arguments: Any, **options: Any) -> Any:
        return request.getfixturevalue("preloaded").Popen(*arguments, **options)

    runner = sys.modules.get(STARTS_PROBES)
    with pytest.MonkeyPatch.context() as patch:
        if runner is not None and request.path.stem not in ASK_HOW_PROBES_BEGIN:
            patch.setattr(
                runner, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen})
            )
        yield


@pytest.fixture(scope="session")
def simulated() -> Iterator[SimulatedPython]:
    """Runs functions and scripts where torch has the simulated accelerator; the tests have not."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler")
    python = SimulatedPython()
    yield python
    python.close()


class UnitGuard:
    """Ends a unit test that starts a process or sleeps: it is of another kind, and must say so."""

    def __init__(self) -> None:
        self.is_on = False
        self.offence: str | None = None
        sys.addaudithook(self._on_audit)  # for good: Python has no way to remove one

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Fails the test also for what the code under test has caught."""
        slept_s, sleep = 0.0, time.sleep

        def counted(seconds: float) -> None:
            nonlocal slept_s
            slept_s += seconds
            if slept_s > MOST_SLEEP_S:
                self.refuse(f"a unit test sleeps for more than {MOST_SLEEP_S} s")
            sleep(seconds)

        self.is_on, self.offence = True, None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", counted)
            # Spawn and fork server raise no audit event.
            start = "a unit test starts a process: multiprocessing"
            patch.setattr(
                multiprocessing.process.BaseProcess, "start", lambda process: self.refuse(start)
            )
            try:
                yield
            finally:
                self.is_on = False
        self.check()

    def refuse(self, offence: str) -> None:
        self.offence = offence
        self.check()

    def check(self) -> None:
        if self.offence is not None:
            pytest.fail(
                f"{self.offence}; mark it process, system or acceptance (see tests/conftest.py)"
            )

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        lists_fonts = (
            bool(arguments) and arguments[0] == "fc-list"
        )  # matplotlib, once on a new machine
        if self.is_on and event in STARTS and not lists_fonts:
            self.refuse(f"a unit test starts a process: {event} {arguments[:2]!r}")


guard = UnitGuard()


@pytest.fixture
def unit_guard() -> UnitGuard:
    return guard


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with guard.watching() if item.get_closest_marker("unit") else contextlib.nullcontext():
        return (yield)


pytest_runtest_setup = pytest_runtest_call
"""Fixtures are watched, too."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of another kind are not imported: some take seconds, for the sake of a framework."""
    if config.option.markexpr not in ("unit", "acceptance") or not collection_path.name.startswith(
        "test_"
    ):
        return None
    kind = re.search(
        r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", collection_path.read_text(), re.MULTILINE
    )
    return True if kind and kind[1] in KINDS and kind[1] != config.option.markexpr else None


def pytest_configure() -> None:
    # A job that a shell starts in the background ignores Ctrl-C, and so do the processes it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # xdist's workers inherit it, and so do forks that test a mutant.
    if not Path(tempfile.gettempdir()).name.startswith(TEMPORARY):
        # Bursts link what the temporary folder has: here nothing, whatever else the machine runs.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=TEMPORARY)
        # After multiprocessing has removed its own folder there, for which -100 stands.
        Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)


@pytest.hookimpl(tryfirst=True)  # before -m selects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(pytest.mark.unit)
        if item.get_closest_marker("rerun") and config.pluginmanager.hasplugin("rerunfailures"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if "simulated" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(300))  # the first one compiles the accelerator
    check_reruns(item for item in items if item.get_closest_marker("rerun"))
    # Longest first, so that no long one is left alone at the end.
    items.sort(key=_rank)
    if marked := [item for item in items if item.get_closest_marker("gpu")]:
        import torch  # only when a test asks: the rest of the suite may not need it

        for item in marked:
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections, here and in what is forked, leave alone what all tests import


def _rank(item: pytest.Item) -> tuple[bool, int]:
    """Groups of files, then kind by kind."""
    kinds = [mark.name for mark in item.iter_markers() if mark.name in LONGEST_FIRST]
    return not item.get_closest_marker("xdist_group"), min(map(LONGEST_FIRST.index, kinds))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker gets a file at once, or all files that name a group, such as those that import the
    frameworks, which takes ten seconds. (xdist 3.8's own `loadgroup` has no effect in pytest 9.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return ByGroup(config, log)


@functools.cache
def group_of(path: Path) -> str:
    """That of a file, which stands in its text as `xdist_group("the group")`; else the file."""
    found = re.search(r'xdist_group\("(\w+)"\)', path.read_text(encoding="utf-8"))
    return found[1] if found else path.name


def check_reruns(items: Iterable[pytest.Item]) -> None:
    """Raises a UsageError where a rerun has no reason, or more tests have one than may."""
    names = {item.nodeid.partition("[")[0]: item.get_closest_marker("rerun") for item in items}
    for name, mark in names.items():
        if not (mark and mark.args and isinstance(mark.args[0], str)):
            raise pytest.UsageError(f"{name} is marked rerun without a reason")
    if len(names) > MOST_NAMED:
        raise pytest.UsageError(f"{len(names)} tests are marked rerun, {MOST_NAMED} may be")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    count = len(terminalreporter.stats.get("rerun", ()))
    terminalreporter.write_line(f"reruns: {count}, of {MOST_RERUNS} that may be")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and len(reporter.stats.get("rerun", ())) > MOST_RERUNS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
