"""`autotune-loader show`: a `loader.json` as text, as code or as a page."""

from __future__ import annotations

from typing import Any

from autotune_loader.cli.parser import Command, option
from autotune_loader.values import require_writable


@Command(
    "show",
    option("path", metavar="LOADER.JSON", nargs="?", default="loader.json", help="The file.  [default: loader.json]"),
    option("--code", dest="as_code", action="store_true", help="Print Python code for your training script."),
    option("--html", dest="page", metavar="FILE", help="Write an HTML page with pictures here."),
)
def show_command(path: str, as_code: bool, page: str | None) -> None:
    """Print a loader.json, and whether it fits this machine.

    Examples:
      autotune-loader show loader.json
      autotune-loader show loader.json --code
      autotune-loader show loader.json --html report.html
    """
    from autotune_loader import TuningResult

    result = TuningResult.load(path)
    if as_code:
        print(code_of(result))
    elif page is None:
        print(result.report())
        if result.machine is not None:
            print("\n".join(["", *(result.differences() or ["This machine matches the one that was tuned."])]))
    else:
        require_writable("--html", page, "report.html")
        result.save_html(page)
        print(f"Written to {page}.")


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
