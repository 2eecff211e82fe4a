"""`autotune-loader tune`, from `train.py:make_loader` to the arguments of `tune()`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import autotune_loader
from autotune_loader import WorkloadError
from autotune_loader.cli.parser import UsageError, add_command, count, usage_errors
from autotune_loader.values import ALLOWABLE, nearest

_CODES = {"fallback": 3, "partial": 130}
"""Exit codes of results that are not what was asked for; 130 is a shell's for SIGINT (128 + 2)."""
_REST = "Arguments of the script go after --."
_ALLOW = f"Search this, too, although it changes training: {', '.join(ALLOWABLE)}. Repeatable."


def add(commands: Any) -> None:
    """Add `tune`."""
    add = add_command(commands, "tune", tune_command, hint=_REST, rest="arguments").add_argument
    add("factory", metavar="MODULE:FUNCTION", help="package.module:function or path/to/file.py:function")
    add("-o", "--output", metavar="FILE", help="Write loader.json to FILE.  [default: loader.json]")
    add("--trace", metavar="FILE", help="Write a trace of all trials for ui.perfetto.dev to FILE.")
    add("--budget", metavar="TIME", help="Most wall time for trials, such as 3m.  [default: 60s]")
    add("--max-workers", metavar="N", type=partial(count, least=0), help="At most this many workers.")
    add("--allow", metavar="WHAT", action="append", choices=ALLOWABLE, help=_ALLOW)
    add("--storage", metavar="PLACE", help="Store the Optuna study here: a file, or the URL of a database.")
    add("--quiet", action="store_true", help="Print no progress.")


def tune_command(factory: str, arguments: Sequence[str], quiet: bool, **options: Any) -> int:
    """Tune the DataLoader that a function of your script returns.

    The function takes no arguments and returns a dataset, a DataLoader, a tuple
    (data, model), or a dict of arguments for tune(). Options given here override
    it. Arguments after -- are the command line that the script sees.

    Examples:
      autotune-loader tune train.py:make_loader
      autotune-loader tune project.data:make --budget 3m --max-workers 16
      autotune-loader tune train.py:make_loader -- --data /data --epochs 3
    """
    given = {name: value for name, value in options.items() if value is not None}
    with _process_of_its_own(arguments):
        data, own = _workload(factory)
        tune = autotune_loader.tune  # only now: a script may set variables that torch reads as it is imported
        with usage_errors():  # of its arguments
            if (storage := given.pop("storage", None)) is not None:
                from autotune_loader.tuning.study import open_study

                given["study"] = open_study(storage, factory)
            wanted = {"output": "loader.json", "progress": not quiet, **own, **given}
            result = tune(data, **wanted)
    print(result.report())
    if (output := wanted["output"]) is None or any(each.kind == "not_written" for each in result.warnings):
        print(f"\nArguments for DataLoader: {result.best.to_kwargs()}")
    else:
        print(f"\nWritten to {output}. For your training script: autotune-loader show {output} --code")
    return _CODES.get(result.status, 0)


@contextlib.contextmanager
def _process_of_its_own(arguments: Sequence[str]) -> Iterator[None]:
    """The user's code finds the process as `python train.py` makes it: `_module` says which file is `__main__`, and runs."""
    kept = sys.argv, sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = ["", *arguments], ModuleType("__main__")
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"] = kept


def _workload(target: str) -> tuple[Any, dict[str, Any]]:
    """What a function makes, or what an object is: the data that `tune()` takes first, and its other arguments."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(f"{target!r} does not name a function. Add its name, as in path/to/file.py:function.")
    module = _module(place)
    if not hasattr(module, name):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        near = nearest(name, own)
        hint = f"Did you mean {place}:{near}?" if near else f"It has {', '.join(own) or 'no function'}."
        raise UsageError(f"{place} has no {name!r}. {hint}")
    made = getattr(module, name)
    if callable(made):
        try:
            made = made()
        except (Exception, SystemExit) as error:
            raise _users_error(f"{target} failed", error) from error
    if isinstance(made, dict) and "data" in made:
        return made["data"], {name: value for name, value in made.items() if name != "data"}
    return (made[0], {"model": made[1]}) if isinstance(made, tuple) and len(made) == 2 else (made, {})


def _module(place: str) -> Any:
    folder, name = str(Path.cwd()), place
    if place.endswith(".py"):
        folder, name = str(Path(place).resolve().parent), Path(place).stem
        if not Path(place).is_file():
            raise _no_such("file", place)
    sys.path[:0] = [each for each in dict.fromkeys((folder, str(Path.cwd()))) if each not in sys.path]
    try:
        if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None:
            sys.argv[0] = sys.modules["__main__"].__file__ = spec.origin
        sys.modules["__main__"] = module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise _no_such("module", missing) from None
        raise _users_error(f"importing {place} failed", error) from error
    # Processes that tuning starts import it by its name, too.
    if place.endswith(".py") and not Path(place).samefile(module.__file__ or os.devnull):
        raise UsageError(f"{place!r} cannot be imported: another module has the name {name!r}. Rename the file.")
    return module


def _no_such(kind: str, name: str) -> UsageError:
    """The error for a file or a module that is not there, with the nearest script of its folder."""
    scripts = [str(each) for each in Path(name).parent.glob("*.py")]
    near = nearest(name, scripts if kind == "file" else [Path(each).stem for each in scripts])
    return UsageError(f"there is no {kind} {name!r} in {Path.cwd()}." + (f" Did you mean {near}?" if near else ""))


def _users_error(message: str, error: BaseException) -> WorkloadError:
    """The user's own traceback: without our frames and those of the import system above theirs."""
    message += f". {_REST}" if isinstance(error, SystemExit) else ""
    frame, ours = error.__traceback__, (__file__, importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    return WorkloadError(message, "".join(traceback.format_exception(type(error), error, frame)))
