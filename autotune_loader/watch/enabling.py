"""`autotune_loader.enable("watch")`: what the command line does to a script, from within it, in one line."""

from __future__ import annotations

import os
from pathlib import Path

from autotune_loader.watch.hook import Hook, active
from autotune_loader.watch.run_plan import Plan, Verb


def enable(
    verb: Verb = "watch",
    *,
    workers: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> Hook:
    """Look at every DataLoader that this process iterates from now on, whoever makes it: Lightning, a Trainer, Accelerate.

    Under `autotune-loader watch` and `run`, which do so already, it changes nothing.

    Args:
        verb: "watch" measures and changes nothing; "run" tunes workers while training, as `AutoLoader` does.
        workers: whether loaders that ask for no workers may have some: their data may be read from other processes.
        output: where `loader.json` is written at the end.

    Returns:
        A context manager whose end is that of the looking; without `with`, that is the process' end.

    Raises:
        ValueError: another verb; or another one was enabled and not closed.
    """
    if verb not in ("watch", "run"):
        raise ValueError(f"verb={verb!r} is not 'watch' or 'run'; verb='watch' would work")
    if active:
        hook = active[-1]
        if hook.plan.script is None and hook.plan.verb != verb:
            raise ValueError(f"verb={verb!r}: {hook.plan.verb!r} is enabled already; its close() would end it")
        return Hook(hook.plan, hook.session)
    path = None if output is None else str(Path(output).absolute())
    hook = Hook(Plan(verb=verb, workers=workers, output=path))
    hook.install()
    return hook
