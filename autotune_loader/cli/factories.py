"""From `train.py:make_loader` on the command line to the arguments of `tune()`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from autotune_loader import WorkloadError

_EXAMPLE = "train.py:make_loader or package.module:make_loader would work"


def load_workload(target: str) -> tuple[Any, dict[str, Any]]:
    """What `target` makes: the data that `tune()` takes first, and its other arguments.

    Args:
        target: `package.module:name` or `path/to/file.py:name`; the current folder is importable. The name is that of a
            function without required arguments, or of the object itself.

    Raises:
        ValueError, TypeError: there is no such module, file or name, or it gives nothing that can be tuned.
        WorkloadError: the user's own code raised.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"{target!r} does not name a factory; {_EXAMPLE}")
    module = _module(place)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise ValueError(f"{place} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; {_EXAMPLE}"))
    made = getattr(module, name)
    if callable(made):
        try:
            made = made()
        except Exception as error:
            raise _users_error(f"{target} failed; it is called without arguments", error) from error
    return _as_tune_arguments(made, target)


def _module(place: str) -> Any:
    folder, name = str(Path.cwd()), place
    if place.endswith(".py"):
        folder, name = str(Path(place).resolve().parent), Path(place).stem
        if not Path(place).is_file():
            raise ValueError(f"there is no file {place!r} in {Path.cwd()}; {_EXAMPLE}")
    sys.path[:0] = [each for each in dict.fromkeys((folder, str(Path.cwd()))) if each not in sys.path]
    try:
        module = importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise ValueError(f"there is no module {missing!r} here ({Path.cwd()}); {_EXAMPLE}") from None
        raise _users_error(f"importing {place} failed", error) from error
    # Processes that tuning starts import it by its name, too.
    if place.endswith(".py") and not Path(place).samefile(module.__file__ or os.devnull):
        raise ValueError(f"{place!r} cannot be imported: another module has the name {name!r}; rename it")
    return module


def _users_error(message: str, error: Exception) -> WorkloadError:
    """The user's own traceback: without our frames and those of the import system above theirs."""
    frame, ours = error.__traceback__, (__file__, importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    return WorkloadError(message, "".join(traceback.format_exception(type(error), error, frame)))


def _as_tune_arguments(made: Any, target: str) -> tuple[Any, dict[str, Any]]:
    """A dataset, a DataLoader, a (dataset, model) tuple or a dict of `tune()`'s arguments."""
    if isinstance(made, dict) and "data" in made:
        return made["data"], {name: value for name, value in made.items() if name != "data"}
    if isinstance(made, tuple) and len(made) == 2:
        return made[0], {"model": made[1]}
    if isinstance(made, (dict, tuple, str)) or not (hasattr(made, "__getitem__") or hasattr(made, "__iter__")):
        raise TypeError(
            f"{target} gives {'None' if made is None else f'a {type(made).__name__}'}; it has to give a dataset, "
            "a DataLoader, a tuple (dataset, model), or a dict such as {'data': dataset, 'batch_size': 64}"
        )
    return made, {}
