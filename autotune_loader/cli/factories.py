"""From `train.py:make_loader` on the command line to keyword arguments for `tune()`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from autotune_loader.values.errors import WorkloadError

_EXAMPLE = "train.py:make_loader or package.module:make_loader would work"


def load_workload(target: str) -> dict[str, Any]:
    """The workload that `target` names, as keyword arguments for `tune()`.

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
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        near = difflib.get_close_matches(name, own, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{module.__name__} has no {name!r}: it has {', '.join(map(repr, own)) or 'nothing'}{meant}")
    made = getattr(module, name)
    return as_tune_arguments(_called(made, target) if callable(made) else made, target)


def _module(place: str) -> Any:
    _make_importable(os.getcwd())  # noqa: PTH109 - sys.path holds strings
    name = _module_name(Path(place)) if place.endswith(".py") else place
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise ValueError(f"there is no module {missing!r} here ({Path.cwd()}); {_EXAMPLE}") from None
        raise _users_error(f"importing {place} failed", error) from error


def _module_name(file: Path) -> str:
    """The name under which a file's module can be imported, here and in the processes that tuning starts."""
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r} in {Path.cwd()}; {_EXAMPLE}")
    loaded = getattr(sys.modules.get(file.stem), "__file__", None)
    if not file.stem.isidentifier() or (
        file.stem in sys.modules and (loaded is None or Path(loaded).resolve() != file.resolve())
    ):
        raise ValueError(f"{file.name!r} cannot be imported: {file.stem!r} is taken or is no Python name; rename it")
    _make_importable(str(file.resolve().parent))
    return file.stem


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _called(factory: Any, target: str) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise TypeError(f"{target} is called without arguments, and that fails: {error}; give it defaults") from None
    except ValueError:  # built in C: the call itself will tell
        pass
    try:
        return factory()
    except Exception as error:
        raise _users_error(f"{target} failed", error) from error


def _users_error(message: str, error: Exception) -> WorkloadError:
    """The user's own traceback: without our frames and those of the import system above theirs."""
    frame, ours = error.__traceback__, (__file__, importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    return WorkloadError(message, "".join(traceback.format_exception(type(error), error, frame)))


def as_tune_arguments(made: Any, target: str) -> dict[str, Any]:
    """A dataset, a DataLoader, a (dataset, model) tuple or a dict of `tune()`'s arguments, as the last of these."""
    from autotune_loader.tuning import tune as tuner

    if isinstance(made, tuple) and len(made) == 2:
        return {"dataset_or_loader": made[0], "model": made[1]}
    if not isinstance(made, dict):
        if isinstance(made, (tuple, str)) or not (hasattr(made, "__getitem__") or hasattr(made, "__iter__")):
            raise TypeError(
                f"{target} gives {'None' if made is None else f'a {type(made).__name__}'}; it has to give a dataset, "
                "a DataLoader, a tuple (dataset, model), or a dict such as {'dataset_or_loader': dataset, 'batch_size': 64}"
            )
        return {"dataset_or_loader": made}
    known = list(inspect.signature(tuner.tune).parameters)
    for name in made:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or ["dataset_or_loader"]
            raise TypeError(f"{target} gives {name!r}, which tune() does not take; {near[0]!r} would work")
    if "dataset_or_loader" not in made:
        raise TypeError(f"{target} gives a dict without 'dataset_or_loader', the dataset or DataLoader to tune")
    return dict(made)
