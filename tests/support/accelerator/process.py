"""Processes that have the simulated accelerator."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
from preloaded import ROOT, PreloadedPython

from tests.support.accelerator import built

CALL = """
import atexit, multiprocessing, os, pickle, sys
from pathlib import Path

multiprocessing.set_start_method("fork")  # no other worker could import the test's file
function, arguments, options = pickle.loads(Path(sys.argv[1]).read_bytes())
Path(sys.argv[2]).write_bytes(pickle.dumps(function(*arguments, **options)))
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)  # an interpreter's ordinary end takes most of a second
"""


class SimulatedPython(PreloadedPython):
    """A preloaded Python whose scripts and their processes have the device "sim"."""

    def __init__(self) -> None:
        self.folder = built(ROOT / "build" / "accelerator")
        super().__init__(environ={"PYTHONPATH": f"{ROOT}:{self.folder}"})

    def call(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 60, **options: Any
    ) -> Any:
        """What a function of the test's file returns in a process of its own."""
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "call.py").write_text(CALL)
            (folder / "call").write_bytes(cloudpickle.dumps((function, arguments, options)))
            run = self.start("call.py", "call", "result", folder=folder, probes=True)
            assert run.wait(timeout) == 0, run.output
            return pickle.loads((folder / "result").read_bytes())
