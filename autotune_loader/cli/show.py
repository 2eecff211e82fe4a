"""`autotune-loader show`: a `loader.json` as text, as code or as a page."""

from __future__ import annotations

from typing import Any

import click

_FILE = click.Path(dir_okay=False)  # read and checked where its contents are


@click.command("show")
@click.argument("path", metavar="LOADER.JSON", type=_FILE, default="loader.json")
@click.option("--code", "as_code", is_flag=True, help="Print Python for your training script instead.")
@click.option("--html", "page", type=_FILE, help="Write a page with pictures here instead.")
def show_command(path: str, as_code: bool, page: str | None) -> None:
    """Print a loader.json, and whether this machine matches it.

    \b
    Examples:
      autotune-loader show loader.json
      autotune-loader show loader.json --code
      autotune-loader show loader.json --html report.html
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader import TuningResult

    result = TuningResult.load(path)
    if as_code:
        click.echo(code_of(result))
    elif page is None:
        click.echo(result.report())
        if result.machine is not None:
            click.echo("\n".join(["", *(result.differences() or ["This machine is the same in all that matters."])]))
    else:
        try:
            result.save_html(page)
        except OSError as error:
            raise ValueError(f"--html={page!r} cannot be written: {error.strerror}") from error
        click.echo(f"Written to {page}.")


def code_of(result: Any) -> str:
    """Python that sets what was tuned and needs nothing but torch."""
    best = result.best
    size = {} if best.batch_size is None else {"batch_size": best.batch_size}
    arguments = [f"    {name}={value!r}," for name, value in {**size, **best.arguments()}.items()]
    order = "shuffle=True" if result.shuffle else "..."
    lines = [f"# {best}", "loader_arguments = dict(", *arguments, ")"]
    lines.append(f"# loader = DataLoader(dataset, {order}, **loader_arguments)")
    if best.device_prefetch:
        lines.append("# from autotune_loader import DevicePrefetcher")
        lines.append(f"# loader = DevicePrefetcher(loader, 'cuda', depth={best.device_prefetch})")
    return "\n".join(lines)
