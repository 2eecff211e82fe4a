"""Commands that read a `loader.json`: `show` and `apply`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult

_FILE = click.Path(dir_okay=False)  # read and checked where its contents are


@click.command("show")
@click.argument("path", metavar="LOADER.JSON", type=_FILE)
@click.option("--html", "page", type=_FILE, help="Write an HTML page with all pictures here instead.")
def show_command(path: str, page: str | None) -> None:
    """Print what was found, and whether this machine fits.

    It says how this machine differs from the one of the tuning. With --html the result is written as one page that needs
    nothing else and can be opened anywhere.

    \b
    Examples:
      autotune-loader show loader.json
      autotune-loader show loader.json --html report.html
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.report.machines import render_machines
    from autotune_loader.report.page import save_html
    from autotune_loader.results.result import TuningResult

    result = TuningResult.load(path)
    if page is None:
        click.echo(f"{result.report()}\n\n{render_machines(result.fingerprint)}")
        return
    try:
        save_html(result, page)
    except OSError as error:
        raise ValueError(
            f"--html={page!r} cannot be written ({error.strerror}); --html=report.html would work"
        ) from error
    click.echo(f"Written to {page}.")


@click.command("apply")
@click.argument("path", metavar="LOADER.JSON", type=_FILE)
@click.option("--to", "form", type=click.Choice(("kwargs", "snippet")), default="kwargs", show_default=True)
def apply_command(path: str, form: str) -> None:
    """Print the configuration in the form that a training job takes.

    \b
    Examples:
      autotune-loader apply loader.json --to kwargs    JSON: arguments for DataLoader
      autotune-loader apply loader.json --to snippet   Python with the same, and threads
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.results.result import TuningResult

    result = TuningResult.load(path)
    click.echo(json.dumps(_arguments(result), indent=2) if form == "kwargs" else snippet(result))


def snippet(result: TuningResult) -> str:
    """Python that sets what was tuned and needs nothing but torch."""
    best, lines = result.best, []
    if best.consumer_threads is not None:
        lines.append(f"torch.set_num_threads({best.consumer_threads})  # once, before the training loop")
    if best.sharing_strategy is not None:
        lines.append(f"torch.multiprocessing.set_sharing_strategy({best.sharing_strategy!r})")
    arguments = [f"    {json.dumps(name)}: {value!r}," for name, value in _arguments(result).items()]
    lines = ["import torch", *lines] if lines else []
    lines = [f"# {best}; written by autotune-loader", *lines, "LOADER_ARGUMENTS = {", *arguments, "}"]
    lines.append("# loader = DataLoader(dataset, shuffle=True, **LOADER_ARGUMENTS)")
    if best.device_prefetch:
        lines.append("# from autotune_loader import DevicePrefetcher")
        lines.append(f"# loader = DevicePrefetcher(loader, 'cuda', depth={best.device_prefetch})")
    return "\n".join(lines)


def _arguments(result: TuningResult) -> dict[str, Any]:
    size = {} if result.best.batch_size is None else {"batch_size": result.best.batch_size}
    return {**size, **result.best.to_kwargs()}
