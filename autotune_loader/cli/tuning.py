"""`autotune-loader tune` and `demo`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from autotune_loader.cli.exits import exit_code_of
from autotune_loader.tuning.options import ALLOWABLE, SEARCHES
from autotune_loader.values.plan import ISOLATIONS

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult


@click.command("tune")
@click.argument("factory")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write loader.json here, after every trial.")
@click.option("--budget", help="Wall time for everything, such as 60s or 3m.  [default: 60s]")
@click.option("--max-trials", type=int, help="Most configurations to try.")
@click.option("--max-workers", type=click.IntRange(min=0), help="Most workers to try.")
@click.option(
    "--max-cores", type=click.IntRange(min=1), help="Cores that the training job will have: bursts run on so many."
)
@click.option("--max-host-memory", metavar="SIZE", help="Most memory of all processes together, such as 8GB.")
@click.option("--max-shm", metavar="SIZE", help="Most shared memory of the batches in flight, such as 512MiB.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(ALLOWABLE),
    help="Search this too, though it changes training. Repeatable.",
)
@click.option(
    "--tolerance", type=float, help="Rates this close count as equal; the cheapest is chosen.  [default: 0.02]"
)
@click.option("--search", type=click.Choice(SEARCHES), help="How configurations are proposed.  [default: auto]")
@click.option("--seed", type=int, help="Of proposals and samples; timings cannot be seeded.  [default: 0]")
@click.option("--isolation", type=click.Choice(ISOLATIONS), help="Where bursts run.  [default: auto]")
@click.option("--storage", help="Keep the Optuna study: a journal file's path, or a database URL.")
@click.option("--study-name", help="Name of the study in the storage.")
@click.option(
    "--reuse/--no-reuse",
    default=None,
    help="Use an earlier result that a check of about 2 s confirms, or tune anew.  [default: --reuse]",
)
@click.option(
    "--stages/--no-stages",
    default=None,
    help="Watch where the time of a sample goes in the workers.  [default: --stages]",
)
@click.option("--batch-size", type=int, help="Samples per batch, where the factory does not say.")
@click.option("--device", help="Where the step runs, such as cpu or cuda:1.  [default: auto]")
@click.option("--json", "as_json", is_flag=True, help="Print only the result on stdout, as loader.json has it.")
@click.option("--quiet", is_flag=True, help="No progress.")
def tune_command(
    factory: str, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Tune what FACTORY makes.

    FACTORY is package.module:function or path/to/file.py:function. The function takes no arguments and returns a
    dataset, a DataLoader, a tuple (dataset, model), or a dict of arguments for tune(). Options given here win over it.

    \b
    Examples:
      autotune-loader tune train.py:make_loader -o loader.json
      autotune-loader tune project.data:make --budget 3m --max-workers 16 --allow in_order
      autotune-loader tune train.py:make_loader --json | jq .dataloader_kwargs
    """  # noqa: D301 - click's mark is the character itself
    given = {name: value for name, value in options.items() if value not in (None, ())}
    # The word, not the function, which tests and users may replace.
    from autotune_loader.cli.factories import load_workload
    from autotune_loader.tuning import tune as tuner

    with _stdout_kept_for_us() if as_json else contextlib.nullcontext():
        wanted = load_workload(factory) | given
        if quiet or "progress" not in wanted:  # who types a command wants to see it work, also through a pipe
            wanted["progress"] = "off" if quiet else "on"
        result = tuner.tune(**wanted)
    _print_result(result, given.get("output"), as_json=as_json)
    return exit_code_of(result)


@click.command("demo")
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="loader.json", show_default=True)
@click.option("--budget", default="60s", show_default=True, help="Wall time for tuning, such as 60s or 3m.")
def demo_command(output: str, budget: str) -> int:
    """Tune a small real training job.

    1,200 JPEG files are made once, in a cache folder. They are decoded, augmented and train a small CNN.

    \b
    Examples:
      autotune-loader demo
      autotune-loader demo -o loader.json --budget 30s
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader import demo
    from autotune_loader.tuning import tune as tuner

    click.echo(
        f"The training job: JPEG files in {demo.cache_folder()}, decoded and augmented, and a small CNN.", err=True
    )
    result = tuner.tune(**demo.demo_factory(), budget=budget, output=output, reuse=False, progress="on")
    click.echo(f"{result.report()}\n\nWritten to {output}. Use it: autotune-loader apply {output} --to snippet")
    return exit_code_of(result)


def _print_result(result: TuningResult, output: str | None, *, as_json: bool) -> None:
    from autotune_loader.tuning.assemble import NOT_WRITTEN

    if as_json:
        click.echo(result_json(result))
        return
    click.echo(result.report())
    if output and not any(NOT_WRITTEN in warning for warning in result.warnings):
        click.echo(f"\nWritten to {output}. Use it: autotune-loader apply {output} --to snippet")
    else:
        click.echo(f"\nDataLoader arguments: {result.best.to_kwargs()}\nNothing was written; -o loader.json would.")


def result_json(result: TuningResult) -> str:
    """The result as `loader.json` has it."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(result.to_dict()), indent=2).decode()


@contextlib.contextmanager
def _stdout_kept_for_us() -> Iterator[None]:
    """Send to stderr what anything else prints, worker processes and C libraries included."""
    sys.__stdout__.flush() if sys.__stdout__ else None
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
