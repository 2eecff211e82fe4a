"""Commands that read a `loader.json`: `show`, `report` and `apply`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune_loader.cli.recipes import RECIPES

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult

_FILE = click.Path(dir_okay=False)  # read and checked where its contents are


def _load(path: str) -> TuningResult:
    from autotune_loader.results.result import TuningResult

    return TuningResult.load(path)


@click.command("show")
@click.argument("path", metavar="LOADER.JSON", type=_FILE)
def show_command(path: str) -> None:
    """Print what was found, and whether this machine fits.

    The machine that it was found on is shown beside this one.

    \b
    Example:
      autotune-loader show loader.json
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.report.machines import render_machines

    result = _load(path)
    click.echo(f"{result.report()}\n\n{render_machines(result.fingerprint)}")


@click.command("report")
@click.argument("path", metavar="LOADER.JSON", type=_FILE)
@click.option("-o", "--output", type=_FILE, default="report.html", show_default=True, help="The page to write.")
def report_command(path: str, output: str) -> None:
    """Write an HTML page with table, pictures and verdict.

    Everything is inside, so that it can be opened anywhere.

    \b
    Example:
      autotune-loader report loader.json -o report.html
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.report.page import render_html

    page = render_html(_load(path))
    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output={output!r} cannot be written ({error.strerror})") from error
    click.echo(f"Written to {output}.")


@click.command("apply")
@click.argument("path", metavar="LOADER.JSON", type=_FILE)
@click.option(
    "--to", "form", type=click.Choice(tuple(RECIPES)), default="kwargs", show_default=True, help="What to print."
)
def apply_command(path: str, form: str) -> None:
    """Print the configuration in the form that a training job takes.

    \b
    Examples:
      autotune-loader apply loader.json --to kwargs    JSON: arguments for DataLoader
      autotune-loader apply loader.json --to snippet   Python that makes the loader
    """  # noqa: D301 - click's mark is the character itself
    click.echo(RECIPES[form](_load(path)))
