"""Commands that read a `loader.json`: `show` and `apply`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult

_FILE = click.Path(dir_okay=False)  # read and checked where its contents are
# Without workers torch refuses or ignores them.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "in_order", "multiprocessing_context")
_SNIPPET = '''\
# {config}; written by autotune-loader
{imports}from torch.utils.data import DataLoader

{settings}LOADER_ARGUMENTS = {arguments}


def make_loader(dataset, **arguments):
    """A tuned DataLoader; `arguments` such as batch_size and shuffle come on top and win."""
    arguments = {{**LOADER_ARGUMENTS, **arguments}}
    if arguments["num_workers"] == 0:  # options of workers go with the workers
        arguments = {{name: value for name, value in arguments.items() if name not in {of_workers!r}}}
    return DataLoader(dataset, **arguments)
'''


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
    from autotune_loader.report.page import render_html
    from autotune_loader.results.result import TuningResult

    result = TuningResult.load(path)
    if page is None:
        click.echo(f"{result.report()}\n\n{render_machines(result.fingerprint)}")
        return
    text = render_html(result)
    try:
        Path(page).write_text(text, encoding="utf-8")
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
      autotune-loader apply loader.json --to snippet   Python that makes the loader
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.results.result import TuningResult

    result = TuningResult.load(path)
    click.echo(json.dumps(_arguments(result), indent=2) if form == "kwargs" else snippet(result))


def snippet(result: TuningResult) -> str:
    """Python that makes the tuned loader and needs nothing but torch."""
    best, settings = result.best, []
    if best.consumer_threads is not None:
        settings.append(f"torch.set_num_threads({best.consumer_threads})  # once, before the training loop\n")
    if best.sharing_strategy is not None:
        settings.append(f"torch.multiprocessing.set_sharing_strategy({best.sharing_strategy!r})\n")
    lines = "".join(f"    {json.dumps(name)}: {value!r},\n" for name, value in _arguments(result).items())
    text = _SNIPPET.format(
        config=best,
        imports="import torch\n" if settings else "",
        settings="".join([*settings, "\n"]) if settings else "",
        arguments=f"{{\n{lines}}}",
        of_workers=_OF_WORKERS,
    )
    depth = best.device_prefetch
    ahead = f"\n\n# from autotune_loader import DevicePrefetcher\n# loader = DevicePrefetcher(loader, 'cuda', depth={depth})"
    return text.rstrip() + (ahead if depth else "")


def _arguments(result: TuningResult) -> dict[str, Any]:
    size = {} if result.best.batch_size is None else {"batch_size": result.best.batch_size}
    return {**size, **result.best.to_kwargs()}
