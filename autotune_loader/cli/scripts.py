"""`autotune-loader watch`, `run` and, for a script, `tune`: what is to be done with which script; `launch` does it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from autotune_loader.scripts.plan import Plan, Verb
from autotune_loader.values.serialization import require_writable
from autotune_loader.values.validation import require_count

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A script that is to be run once the command line has been read: nothing of ours is to be in its way."""

    plan: Plan
    target: str
    arguments: tuple[str, ...]
    is_module: bool


def _of_scripts(command: _Function) -> _Function:
    """The options of `watch` and `run`."""
    options = [
        click.argument("script"),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as for python -m."),
        click.option("-o", "--output", type=_FILE, help="Write loader.json here at the end."),
        click.option("--report", "page", type=_FILE, help="Write an HTML page here at the end."),
        click.option("--json", "as_json", is_flag=True, help="The report as one line of JSON, still on stderr."),
        click.option(
            "--fail-if-wait",
            metavar="SHARE",
            help="End with 4 where the training loop waits for more than this share of its time, such as 10%.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("watch", context_settings={"allow_interspersed_args": False})
@_of_scripts
def watch_command(script: str, arguments: tuple[str, ...], is_module: bool, **options: Any) -> Launch:
    """Run a script, unchanged, and tell what its loaders cost.

    Batches, random numbers and weights are those of python SCRIPT. The report comes at the end, on stderr: one block
    for each DataLoader, by the line that makes it.

    \b
    Examples:
      autotune-loader watch train.py --epochs 3
      autotune-loader watch -m project.train
      autotune-loader watch --fail-if-wait 10% train.py    for CI
    """  # noqa: D301 - click's mark is the character itself
    return launch_of("watch", script, arguments, is_module=is_module, **options)


@click.command("run", context_settings={"allow_interspersed_args": False})
@_of_scripts
@click.option("--apply", type=_FILE, help="Start with the settings of this loader.json.")
@click.option("--max-workers", type=int, help="Most workers of each loader.")
def run_command(script: str, arguments: tuple[str, ...], is_module: bool, **options: Any) -> Launch:
    """Run a script unchanged, and tune its loaders meanwhile.

    Samples and their order stay those of python SCRIPT; random augmentations are drawn by batch. Loaders whose workers
    may not be changed run as they are, and the report says why.

    \b
    Examples:
      autotune-loader run -o loader.json train.py --epochs 90
      autotune-loader run --apply loader.json train.py     begins where that one ended
      torchrun --nproc-per-node 2 -m autotune_loader run train.py
    """  # noqa: D301 - click's mark is the character itself
    return launch_of("run", script, arguments, is_module=is_module, **options)


def launch_of(
    verb: Verb, script: str, arguments: tuple[str, ...], *, is_module: bool = False, **options: Any
) -> Launch:
    """What the options ask for, checked.

    Args:
        verb: the command.
        script: path, or name of a module.
        arguments: of the script.
        is_module: whether it is a module's name.
        **options: of the command, as typed; None where they were not.

    Raises:
        ValueError, TypeError: an option is wrong.
    """
    from autotune_loader.tuning.options import parse_seconds

    budget = options.get("budget")
    paths = {name: options.get(name) for name in ("output", "page", "apply")}
    if paths["apply"] is not None:
        from autotune_loader.results.loader_file import read_loader_file

        read_loader_file(paths["apply"])
    for option, name, example in (("--output", "output", "loader.json"), ("--report", "page", "report.html")):
        if (path := paths[name]) is not None:  # now, and not after hours of training
            require_writable(option, path, example)
    require_count("--max-workers", options.get("max_workers"), minimum=0)
    plan = Plan(
        verb=verb,
        script=f"-m {script}" if is_module else script,
        as_json=bool(options.get("as_json")),
        most_waiting=_share(options.get("fail_if_wait")),
        budget_s=None if budget is None else parse_seconds("budget", budget),
        max_workers=options.get("max_workers"),
        **{name: None if path is None else os.fspath(Path(path).absolute()) for name, path in paths.items()},
    )
    return Launch(plan=plan, target=script, arguments=arguments, is_module=is_module)


def _share(text: str | None) -> float | None:
    """A share of "10%" or "0.1"."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"--fail-if-wait={text!r} is no share; 10% would work")
    return share
