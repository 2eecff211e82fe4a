"""`autotune-loader watch`, `run` and, for a script, `tune`: what is to be done with which script; `launch` does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from autotune_loader.scripts.plan import Plan, Verb
from autotune_loader.values.serialization import require_writable

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A script that is to be run once the command line has been read: nothing of ours is to be in its way."""

    plan: Plan
    target: str
    arguments: tuple[str, ...]
    is_module: bool


class Share(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A share of "5%" or "0.05"."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"{text!r} is no share; 5% would work", param, ctx)
        return share


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
            "most_waiting",
            type=Share(),
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
@click.option("--max-workers", type=click.IntRange(min=0), help="Most workers of each loader.")
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
    verb: Verb,
    script: str,
    arguments: tuple[str, ...],
    *,
    is_module: bool = False,
    budget: str | None = None,
    **options: Any,
) -> Launch:
    """What the options ask for, checked; those that are not named here are fields of the plan."""
    from autotune_loader.values.validation import parse_seconds

    if options.get("apply") is not None:  # only then: it imports numpy, for which a script may set variables first
        from autotune_loader.results.result import TuningResult

        TuningResult.load(options["apply"])
    for name, option, example in (("output", "--output", "loader.json"), ("page", "--report", "report.html")):
        if options.get(name) is not None:  # now, and not after hours of training
            require_writable(option, options[name], example)
    for name in ("output", "page", "apply"):
        options[name] = None if options.get(name) is None else str(Path(options[name]).absolute())
    budget_s = None if budget is None else parse_seconds("budget", budget)
    plan = Plan(verb=verb, script=f"-m {script}" if is_module else script, budget_s=budget_s, **options)
    return Launch(plan=plan, target=script, arguments=arguments, is_module=is_module)
