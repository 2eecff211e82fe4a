"""`autotune-loader watch`, `run`, `show` and `demo`: what they are given, and who does it."""

from __future__ import annotations

from argparse import PARSER, ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune_loader.cli.parser import BUDGET, Command, count, option
from autotune_loader.values import require_writable
from autotune_loader.watch.run_plan import Plan, Verb

_Launch = Callable[[], None]


def _share(text: str) -> float:
    """A share of "5%" or "0.05"."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgumentTypeError(f"{text!r} must be between 0% and 100%, such as 5%")
    return share


_WAITING = "Exit with 4 if training waits for data more than this share of the time, such as 10%%."
_OF_SCRIPTS = (
    option("script", metavar="SCRIPT", nargs=PARSER, help="The script, and its own arguments."),
    option("-m", dest="is_module", action="store_true", help="SCRIPT is a module name, as in python -m."),
    option("-o", "--output", metavar="FILE", help="Write loader.json here at the end; run also while it tunes."),
    option("--json", dest="report", metavar="FILE", help="Write the report here as JSON."),
    option("--fail-if-wait", dest="most_waiting", type=_share, metavar="SHARE", help=_WAITING),
)
_ALLOW_WORKERS = (
    "Let loaders with num_workers=0 use workers. They take over after two of their batches equal the script's own."
)


@Command(
    "watch",
    *_OF_SCRIPTS,
    option("--trace", metavar="FILE", help="Write each batch's way as a trace for ui.perfetto.dev here."),
    script="train.py",
)
def watch_command(script: Sequence[str], is_module: bool, **options: Any) -> _Launch:
    """Run a script unchanged and report how long it waits for data.

    Batches, random numbers and weights are bit for bit those of python SCRIPT.
    The first line comes within 10 s, the report at the end, on stderr: one
    block per DataLoader, named by the line that creates it, also for processes
    that the script starts. After SIGTERM the report is written before the
    script ends.

    Examples:
      autotune-loader watch train.py --epochs 3
      autotune-loader watch --trace trace.json -m project.train
      autotune-loader watch --fail-if-wait 10% train.py    for CI
    """
    return _launch("watch", script, is_module=is_module, **options)


@Command(
    "run",
    *_OF_SCRIPTS,
    option("--allow-workers", action="store_true", help=_ALLOW_WORKERS),
    option("--start-with", metavar="FILE", help="Start with the settings of this loader.json."),
    option("--max-workers", metavar="N", type=partial(count, least=1), help="At most this many workers per loader."),
    script="train.py",
)
def run_command(script: Sequence[str], is_module: bool, **options: Any) -> _Launch:
    """Run a script unchanged: each DataLoader finds its number of workers.

    It gives the samples that DataLoader gives with the same arguments: the same
    indices in the same order, each once; random augmentations are seeded per
    batch, so that they do not depend on the number of workers. Its workers are
    PyTorch's: they see the dataset as it was at iter(), live as long as
    DataLoader's do, and whatever they do besides samples they do as there. Use
    --allow-workers wherever num_workers=2 would work. Without it, a loader with
    num_workers=0 is PyTorch's own.

    Examples:
      autotune-loader run --allow-workers -o loader.json train.py --epochs 90
      autotune-loader run --start-with loader.json train.py
      torchrun --nproc-per-node 2 -m autotune_loader run train.py
    """
    return _launch("run", script, is_module=is_module, **options)


def _launch(verb: Verb, script: Sequence[str], *, is_module: bool, **options: Any) -> _Launch:
    """What runs the script, once the command line has been read, so that nothing of ours is in its way.

    The options are fields of the plan, checked now and not after hours of training.
    """
    from autotune_loader.watch.launch import launch

    target, *arguments = script[script[0] == "--" :]
    if options.get("start_with") is not None:
        from autotune_loader import TuningResult

        TuningResult.load(options["start_with"])
    files = (
        ("output", "--output", "loader.json"),
        ("report", "--json", "report.json"),
        ("trace", "--trace", "trace.json"),
    )
    for name, typed, example in files:
        if options.get(name) is not None:
            require_writable(typed, options[name], example)
    for name in ("output", "report", "trace", "start_with"):
        options[name] = None if options.get(name) is None else str(Path(options[name]).absolute())
    return partial(launch, Plan(verb=verb, **options), target, arguments, is_module=is_module)


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
        print(_code_of(result))
    elif page is None:
        print(result.report())
        if result.machine is not None:
            print("\n".join(["", *(result.differences() or ["This machine matches the one that was tuned."])]))
    else:
        require_writable("--html", page, "report.html")
        result.save_html(page)
        print(f"Written to {page}.")


def _code_of(result: Any) -> str:
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


@Command(
    "demo",
    option(
        "--latency",
        metavar="MS",
        type=partial(count, least=0),
        default=20,
        help="Milliseconds per request.  [default: 20]",
    ),
    option("--budget", metavar="TIME", default="45s", help=BUDGET.format("45s")),
)
def demo_command(latency: int, budget: str) -> int:
    """Watch a small training job, tune it, and train with the result.

    A small CNN trains on 1,200 JPEG files from a simulated object store: a local
    HTTP server that answers each request after 20 ms. --latency 0 reads them from
    the local disk. All files are temporary.

    Examples:
      autotune-loader demo
      autotune-loader demo --latency 0
    """
    from autotune_loader import demo

    return demo.tour(latency / 1000, budget)
