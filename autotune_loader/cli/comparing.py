"""`autotune-loader compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from autotune_loader.cli.exits import FINE, NOTHING_WORKED, OVER_LIMIT
from autotune_loader.cli.watch import Share
from autotune_loader.values.plan import ISOLATIONS


@click.command("compare")
@click.argument("paths", metavar="A.JSON B.JSON", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--job", metavar="FACTORY", help="What makes the job of loader.json files, as for tune.")
@click.option(
    "--fail-if-slower",
    type=Share(),
    metavar="SHARE",
    help="End with 4 where another file, or a loader of the second watch report, is slower than the first by more.",
)
@click.option("--budget", default="30s", show_default=True, help="Time for bursts and rounds, such as 30s or 2m.")
@click.option("--isolation", type=click.Choice(ISOLATIONS), default="auto", show_default=True, help="Where bursts run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the sides, or the share each loader lost.")
@click.option("--quiet", is_flag=True, help="No progress.")
def compare_command(
    paths: tuple[str, ...], job: str | None, fail_if_slower: float | None, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Run one job with several loader.json in turns.

    The report says which is faster.

    The job is what FACTORY makes: package.module:function or path/to/file.py:function, as for autotune-loader tune. The first
    file is what the others are compared with. Exit code 3 where no two of them work.

    Two reports of autotune-loader watch --json are compared as they are, without a job.

    \b
    Examples:
      autotune-loader compare monday.json friday.json --job train.py:make_loader
      autotune-loader compare before.json after.json --fail-if-slower 5%    two reports of watch --json, for CI
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.cli.factories import load_workload
    from autotune_loader.results.load import load_config
    from autotune_loader.tuning.arguments import make_workload
    from autotune_loader.tuning.compare import compare_workloads, sides_of
    from autotune_loader.tuning.options import TuneOptions
    from autotune_loader.values.validation import parse_seconds

    if len(set(paths)) < 2:
        raise ValueError(f"{paths[0]!r} is one file, and a comparison takes two; a.json b.json would work")
    if job is None:
        return _compare_watched(paths, fail_if_slower, as_json)
    configs = {path: load_config(path) for path in paths}
    workload = make_workload(**load_workload(job))
    budget_s = parse_seconds("budget", options.pop("budget"))
    found = compare_workloads(
        sides_of(configs, workload), TuneOptions(budget_s=budget_s, progress="off" if quiet else "on", **options)
    )
    click.echo(found.to_frame().to_json(orient="records", indent=2) if as_json else found.report())
    if not found.ratios:
        return NOTHING_WORKED
    # What the rounds have shown: a CI job that fails now and then by chance is soon ignored.
    return _within(fail_if_slower, {name: 1 - ratio.high for name, ratio in found.ratios.items()})


def _compare_watched(paths: tuple[str, ...], most: float | None, as_json: bool) -> int:
    from autotune_loader.report.watched import read_watched, render_watched, slowdowns

    reports = [read_watched(path) for path in paths]
    if len(reports) != 2 or reports[0] is None or reports[1] is None:
        raise ValueError(
            f"{' '.join(paths)} are not two reports of watch --json; loader.json files need --job train.py:make_loader"
        )
    lost = slowdowns(reports[0], reports[1])
    if not lost:
        raise ValueError(f"{' and '.join(paths)} have no loader in common: these are of different scripts")
    click.echo(json.dumps(lost, indent=2) if as_json else render_watched(reports[0], reports[1]))
    return _within(most, lost)


def _within(most: float | None, lost: Mapping[str, float | None]) -> int:
    """The exit code for shares of a rate that were lost, by name."""
    slower = [name for name, share in lost.items() if most is not None and (share or 0.0) > most]
    if slower:
        click.echo(f"Slower by more than --fail-if-slower allows: {', '.join(slower)}.", err=True)
    return OVER_LIMIT if slower else FINE
