"""`autotune-loader watch` and `run`: what is to be done with which script; `launch` does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from autotune_loader.values import require_writable
from autotune_loader.watch.run_plan import Plan, Verb

_Launch = Callable[[], None]
_FILE = click.Path(dir_okay=False)


def _share(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """A share of "5%" or "0.05"."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{text!r} must be between 0% and 100%, such as 5%")
    return share


def _of_scripts(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `watch` and `run`."""
    options = [
        click.argument("script"),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module name, as in python -m."),
        click.option(
            "-o",
            "--output",
            type=_FILE,
            help="Write loader.json here: under run whenever better settings are found, and at the end.",
        ),
        click.option("--json", "report", type=_FILE, help="Write the report here as JSON at the end."),
        click.option(
            "--fail-if-wait",
            "most_waiting",
            callback=_share,
            metavar="SHARE",
            help="Exit with 4 if the training loop waits for data more than this share of its time, such as 10%.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("watch", context_settings={"allow_interspersed_args": False})
@_of_scripts
def watch_command(script: str, arguments: tuple[str, ...], is_module: bool, **options: Any) -> _Launch:
    """Run a script unchanged and report how long it waits for data.

    Batches, random numbers and weights are bit for bit those of python SCRIPT. The first line comes within 10 s, the
    report at the end, on stderr: one block for each DataLoader, by the line that makes it, also for those of processes
    that the script starts. SIGTERM ends the script as ever, after the report.

    \b
    Examples:
      autotune-loader watch train.py --epochs 3
      autotune-loader watch -m project.train
      autotune-loader watch --fail-if-wait 10% train.py    for CI
    """  # noqa: D301 - click's mark is the character itself
    return _launch("watch", script, arguments, is_module=is_module, **options)


@click.command("run", context_settings={"allow_interspersed_args": False})
@_of_scripts
@click.option(
    "--workers", is_flag=True, help="Loaders with num_workers=0 may have workers: their data may be read from there."
)
@click.option("--start-with", type=_FILE, help="Start with the settings of this loader.json.")
@click.option("--max-workers", type=click.IntRange(min=1), help="At most this many workers of each loader.")
def run_command(script: str, arguments: tuple[str, ...], is_module: bool, **options: Any) -> _Launch:
    """Run a script unchanged and tune its DataLoaders while it runs.

    Each loader gives the batches that DataLoader gives with the same arguments: the same indices in the same order,
    each once. Its workers are torch's: they see the dataset as it was when they began, live as long as DataLoader's do,
    and whatever they do besides samples they do as there. Only their number changes; random augmentations are drawn by
    batch. A loader with num_workers=0 is torch's own unless you say --workers.

    \b
    Examples:
      autotune-loader run --workers -o loader.json train.py --epochs 90
      autotune-loader run --start-with loader.json train.py     begins where that one ended
      torchrun --nproc-per-node 2 -m autotune_loader run train.py
    """  # noqa: D301 - click's mark is the character itself
    return _launch("run", script, arguments, is_module=is_module, **options)


def _launch(verb: Verb, script: str, arguments: tuple[str, ...], *, is_module: bool, **options: Any) -> _Launch:
    """What runs the script, once the command line has been read, so that nothing of ours is in its way.

    The options are fields of the plan, checked now and not after hours of training.
    """
    from autotune_loader.watch.launch import launch

    if options.get("start_with") is not None:
        from autotune_loader import TuningResult

        TuningResult.load(options["start_with"])
    for name, option, example in (("output", "--output", "loader.json"), ("report", "--json", "report.json")):
        if options[name] is not None:
            require_writable(option, options[name], example)
    for name in ("output", "report", "start_with"):
        options[name] = None if options.get(name) is None else str(Path(options[name]).absolute())
    plan = Plan(verb=verb, script=f"-m {script}" if is_module else script, **options)
    return partial(launch, plan, script, arguments, is_module=is_module)
