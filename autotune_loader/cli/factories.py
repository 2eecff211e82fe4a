"""From `pkg.mod:factory` on the command line to keyword arguments for `tune()`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune_loader.values.errors import WorkloadError

_EXAMPLE = "train.py:make_loader or package.module:make_loader"  # what every message about a target ends with


def load_workload(target: str) -> dict[str, Any]:
    """What the factory named by `target` returns, as keyword arguments for `tune()`.

    Args:
        target: `package.module:name` or `path/to/file.py:name`; the current folder is importable. The name is that of a
            function without required arguments, or of the object itself.

    Raises:
        ValueError, TypeError: there is no such module, file or name, or it gives nothing that can be tuned.
        WorkloadError: the user's own code raised.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise ValueError(f"{target!r} does not name a factory; {_EXAMPLE} would work")
    return as_tune_arguments(_call(_attribute(_module(place), name), target), target)


def _module(place: str) -> ModuleType:
    _make_importable(os.getcwd())  # noqa: PTH109 - sys.path holds strings
    name = _module_name(Path(place)) if place.endswith(".py") else place
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _users_error(f"importing {place} failed", error) from error
        hint = f"; {place.replace('.', '/')}.py does not exist either" if "/" not in place else ""
        raise ValueError(
            f"there is no module {error.name!r} here ({Path.cwd()}){hint}; {_EXAMPLE} would work"
        ) from None
    except Exception as error:
        raise _users_error(f"importing {place} failed", error) from error


def _module_name(file: Path) -> str:
    """The name under which a file's module can be imported, here and in the probe, which has the same `sys.path`."""
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r} in {Path.cwd()}; {_EXAMPLE} would work")
    name, folder = file.stem, str(file.resolve().parent)
    if not name.isidentifier():
        raise ValueError(f"{file.name!r} cannot be imported, for {name!r} is no Python name; rename it")
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if name in sys.modules and (loaded is None or Path(loaded).resolve() != file.resolve()):
        raise ValueError(f"{file.name!r} has the name of a module that is in use already ({name}); rename it")
    _make_importable(folder)
    return name


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _attribute(module: ModuleType, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    public = {each: value for each, value in vars(module).items() if not each.startswith("_") and callable(value)}
    own = [each for each, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    near = difflib.get_close_matches(name, own, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    there = f"it has {', '.join(map(repr, own))}" if own else "it defines nothing that could be one"
    raise ValueError(f"{module.__name__} has no {name!r}: {there}{meant}")


def _call(factory: Any, target: str) -> Any:
    if not callable(factory):
        return factory
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters: Iterable[inspect.Parameter] = ()
    with contextlib.suppress(ValueError):  # built in C: the call itself will tell
        parameters = inspect.signature(factory).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
    if needed:
        raise TypeError(f"{target} needs {', '.join(needed)}, but is called without arguments; give them defaults")
    try:
        return factory()
    except Exception as error:
        raise _users_error(f"{target} failed", error) from error


def _users_error(message: str, error: Exception) -> WorkloadError:
    """The user's own traceback: without our frames and those of the import system above theirs."""
    frame = error.__traceback__
    ours = (__file__, importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    return WorkloadError(message, "".join(traceback.format_exception(type(error), error, frame)))


def as_tune_arguments(made: Any, target: str) -> dict[str, Any]:
    """A dataset, a DataLoader, a (dataset, model) tuple or a dict of `tune()`'s arguments, as the last of these."""
    if isinstance(made, dict):
        _check_names(made, target)
        return dict(made)
    if isinstance(made, tuple) and len(made) == 2:
        return {"dataset_or_loader": made[0], "model": made[1]}
    if made is None or isinstance(made, (tuple, str)) or not any(hasattr(made, m) for m in ("__getitem__", "__iter__")):
        kind = "None" if made is None else f"a {type(made).__name__}"
        given = f"a tuple of {len(made)}" if isinstance(made, tuple) else kind
        raise TypeError(
            f"{target} gives {given}; it has to give a dataset, a DataLoader, a tuple (dataset, model), "
            "or a dict of arguments for tune(), such as {'dataset_or_loader': dataset, 'batch_size': 64}"
        )
    return {"dataset_or_loader": made}


def _check_names(arguments: dict[Any, Any], target: str) -> None:
    from autotune_loader.tuning import tune as tuner

    known = [*inspect.signature(tuner.tune).parameters]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or ["dataset_or_loader"]
            raise TypeError(f"{target} gives {name!r}, which tune() does not take; {near[0]!r} would work")
    if "dataset_or_loader" not in arguments:
        raise TypeError(f"{target} gives a dict without 'dataset_or_loader', the dataset or DataLoader to tune")
