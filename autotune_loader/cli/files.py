"""Commands that read a `loader.json`: `show`, `report`, `apply`; and `schema`, which describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune_loader.cli.exits import CONTRADICTORY, FINE
from autotune_loader.cli.recipes import RECIPES, env_recipe

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult

_FILE = click.Path(dir_okay=False)  # read and checked where its contents are


def _load(path: str) -> TuningResult:
    """The result in a file; of a collection, the one for this machine."""
    from autotune_loader.machine.facts import inspect_machine
    from autotune_loader.results.fleet import entry_for
    from autotune_loader.results.result import TuningResult

    return TuningResult.from_file(entry_for(path, inspect_machine()))


@click.command("show")
@click.argument("path", metavar="LOADER.JSON", type=_FILE)
@click.option("--check", is_flag=True, help="Only check that no figure or sentence contradicts another.")
def show_command(path: str, check: bool) -> int:
    """Print what was found, and whether this machine fits.

    The machine that it was found on is shown beside this one. With --check, the exit code is 1 where the result
    contradicts itself, which would be a mistake of ours.

    \b
    Examples:
      autotune-loader show loader.json
      autotune-loader show loader.json --check
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.report.machines import render_machines

    result = _load(path)
    if check:
        return _checked(result)
    click.echo(f"{result.report()}\n\n{render_machines(result.fingerprint)}")
    return FINE


def _checked(result: TuningResult) -> int:
    from autotune_loader.report.invariants import contradictions

    found = contradictions(result)
    click.echo("\n".join(found) or "Nothing in it contradicts anything else in it.")
    return CONTRADICTORY if found else FINE


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
    "--to", "form", type=click.Choice((*RECIPES, "env")), default="kwargs", show_default=True, help="What to print."
)
def apply_command(path: str, form: str) -> None:
    """Print the configuration in the form that a training job takes.

    \b
    Examples:
      autotune-loader apply loader.json --to kwargs          JSON: arguments for DataLoader
      eval "$(autotune-loader apply loader.json --to env)"   where load_config() finds the file
      autotune-loader apply loader.json --to snippet         Python that makes the loader
      autotune-loader apply loader.json --to hf              fields of transformers.TrainingArguments
      autotune-loader apply loader.json --to lightning       for a LightningDataModule
      autotune-loader apply loader.json --to accelerate      for accelerate's Accelerator
    """  # noqa: D301 - click's mark is the character itself
    result = _load(path)
    click.echo(env_recipe(result, path) if form == "env" else RECIPES[form](result))


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of loader.json.

    \b
    Example:
      autotune-loader schema > loader.schema.json
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.results.loader_file import loader_schema

    click.echo(json.dumps(loader_schema(), indent=2))
