"""Imported by Python as it starts, where PYTHONPATH has this folder: in processes that a watched script starts, as
`Plan.hand_on` puts it there, and where a user does: `PYTHONPATH=$(python -m autotune_loader.watch.startup)`.

It makes itself invisible: the folder leaves `sys.path`, and a `sitecustomize` of the user's own, which it hides, is run.
"""

import contextlib
import importlib
import os
import sys


def _run_the_hidden_one() -> None:
    ours = sys.modules.pop("sitecustomize")
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    sys.modules.setdefault("sitecustomize", ours)


def _begin(package_folder: str) -> None:
    is_known = package_folder in sys.path
    if not is_known:
        sys.path.append(package_folder)
    try:
        from autotune_loader.watch.hook import begin_as_handed_on
    finally:
        if not is_known:
            sys.path.remove(package_folder)
    begin_as_handed_on()


_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - nothing is imported that Python has not
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]  # noqa: PTH100
_run_the_hidden_one()
if "AUTOTUNE_LOADER_SCRIPT" in os.environ or os.environ.get("AUTOTUNE_LOADER"):
    with contextlib.suppress(Exception):  # an interpreter that we cannot live in goes on without us
        _begin(os.path.dirname(os.path.dirname(os.path.dirname(_here))))  # noqa: PTH120
