"""`autotune_loader.enable("watch")`: what the command line does to a script, from within it, in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autotune_loader.watch.hook import Hook, active
from autotune_loader.watch.run_plan import Plan, Verb

VERBS = ("watch", "run")


def enable(
    verb: Verb = "watch",
    *,
    workers: bool = False,
    max_workers: int | None = None,
    start_with: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Hook:
    """Look at every DataLoader that this process iterates from now on, whoever makes it: Lightning, a Trainer, Accelerate.

    Under `autotune-loader watch` and `run`, which do so already, it changes nothing.

    Args:
        verb: "watch" measures and changes nothing; "run" tunes workers while training, as `AutoLoader` does.
        workers: whether loaders that ask for no workers may have some: their data may be read from other processes.
        max_workers: at most this many workers of each loader.
        start_with: the `loader.json` to start with.
        output: where `loader.json` is written at the end.

    Returns:
        A context manager whose end is that of the looking; without `with`, that is the process' end.

    Raises:
        ValueError: another verb; or another one was enabled and not closed.
        ConfigFileError: `start_with` cannot be read.
    """
    if verb not in VERBS:
        raise ValueError(f"verb={verb!r} is not 'watch' or 'run'; verb='watch' would work")
    if active:
        hook = active[-1]
        if hook.plan.script is None and hook.plan.verb != verb:
            raise ValueError(f"verb={verb!r}: {hook.plan.verb!r} is enabled already; its close() would end it")
        return Hook(hook.plan, hook.session)
    if start_with is not None:
        from autotune_loader import TuningResult

        TuningResult.load(start_with)
    plan = Plan(
        verb=verb,
        workers=workers,
        max_workers=max_workers,
        start_with=_absolute(start_with),
        output=_absolute(output),
    )
    hook = Hook(plan)
    hook.install()
    return hook


def _absolute(path: Any) -> str | None:
    return None if path is None else str(Path(path).absolute())
