"""`autotune-loader fleet`: one file for machines of several kinds."""

from __future__ import annotations

import click

_FILE = click.Path(dir_okay=False)  # read and checked where its contents are


@click.group("fleet")
def fleet_command() -> None:
    """Keep one file for machines of several kinds.

    A fleet is a collection of loader.json files, one entry for each kind of machine and dataset. A job loads it like
    a loader.json and gets the entry nearest to the machine it runs on.

    \b
    Examples:
      autotune-loader fleet add fleet.json loader.json   on one host of each kind
      autotune-loader fleet show fleet.json              the entries, and which of them this machine gets
    """  # noqa: D301 - click's mark is the character itself


@fleet_command.command("add")
@click.argument("fleet", metavar="FLEET.JSON", type=_FILE)
@click.argument("paths", metavar="LOADER.JSON...", type=_FILE, nargs=-1, required=True)
def add_command(fleet: str, paths: tuple[str, ...]) -> None:
    """Add results to a collection, which is made if need be.

    An entry for the same kind of machine and the same dataset is replaced. Several hosts may add at once.

    \b
    Example:
      autotune-loader fleet add /shared/fleet.json loader.json
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.results.fleet import add_to_fleet, read_entries
    from autotune_loader.results.result import TuningResult

    for path in paths:
        result = TuningResult.load(path)
        if result.status == "fallback":
            raise ValueError(
                f"{path} holds torch's defaults, because nothing worked when it was tuned; a tuned one would work"
            )
        add_to_fleet(fleet, result)
    count = len(read_entries(fleet))
    click.echo(f"Written to {fleet}, which has {count} {'entry' if count == 1 else 'entries'} now.")


@fleet_command.command("show")
@click.argument("fleet", metavar="FLEET.JSON", type=_FILE)
@click.option("--dataset", help="Which entry this machine gets for that dataset, as the entries name it.")
def show_command(fleet: str, dataset: str | None) -> None:
    """Print the entries of a collection.

    \b
    Example:
      autotune-loader fleet show /shared/fleet.json
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.machine.facts import inspect_machine
    from autotune_loader.report.fleet_table import render_fleet
    from autotune_loader.results.fleet import nearest_entry, read_entries

    entries = read_entries(fleet)
    click.echo(render_fleet(entries, nearest_entry(entries, inspect_machine(), dataset=dataset)))
