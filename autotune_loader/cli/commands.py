"""`autotune-loader watch`, `run`, `check`, `show` and `demo`: what they are given, and who does it."""

from __future__ import annotations

from argparse import PARSER, ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune_loader.cli.doctor import doctor_command
from autotune_loader.cli.parser import UsageError, add_command, count, usage_errors
from autotune_loader.values import require_writable
from autotune_loader.watch.run_plan import Plan, Verb

ANOTHER_MACHINE = 5
"""Exit code of `check` where the file does not fit."""
_OUTPUT = "Write loader.json to FILE at the end; run also updates it while it tunes."
_JSON = "Write the report as JSON to FILE."
_WAITING = "Exit with 4 if training waits for data more than this share of the time, such as 10%%."
_TRACE = "Write a trace of all batches for ui.perfetto.dev to FILE."
_ALLOW_WORKERS = "Let loaders with num_workers=0 use workers, once two of their batches equal the script's own."
_CHECKED = "The file.  [default: that of AUTOTUNE_LOADER_CONFIG, else loader.json]"


def add(commands: Any) -> None:
    """Add them to the subparsers."""
    hint = "Options of the script go after its name."
    watch = add_command(commands, "watch", watch_command, hint=hint)
    run = add_command(commands, "run", run_command, hint=hint)
    for each in (watch, run):
        add = each.add_argument
        add("script", metavar="SCRIPT", nargs=PARSER, help="The script, and its own arguments.")
        add("-m", dest="is_module", action="store_true", help="SCRIPT is a module name, as in python -m.")
        add("-o", "--output", metavar="FILE", type=partial(_written, "--output", "loader.json"), help=_OUTPUT)
        add("--json", dest="report", metavar="FILE", type=partial(_written, "--json", "report.json"), help=_JSON)
        add("--fail-if-wait", dest="most_waiting", type=_share, metavar="SHARE", help=_WAITING)
    watch.add_argument("--trace", metavar="FILE", type=partial(_written, "--trace", "trace.json"), help=_TRACE)
    add = run.add_argument
    add("--allow-workers", action="store_true", help=_ALLOW_WORKERS)
    add("--start-with", metavar="FILE", help="Start with the settings of this loader.json.")
    add("--max-workers", metavar="N", type=partial(count, least=1), help="At most this many workers per loader.")
    add = add_command(commands, "check", check_command).add_argument
    add("path", metavar="LOADER.JSON", nargs="?", help=_CHECKED)
    add("--strict", action="store_true", help="Any difference counts, also another version of torch.")
    add = add_command(commands, "show", show_command).add_argument
    add("path", metavar="LOADER.JSON", nargs="?", default="loader.json", help="The file.  [default: loader.json]")
    add("--code", dest="as_code", action="store_true", help="Print Python code for your training script.")
    add("--html", dest="page", metavar="FILE", help="Write an HTML page with pictures to FILE.")
    add_command(commands, "doctor", doctor_command)
    add, least = add_command(commands, "demo", demo_command).add_argument, partial(count, least=0)
    add("--latency", metavar="MS", type=least, default=20, help="Milliseconds per request.  [default: 20]")
    add("--budget", metavar="TIME", default="45s", help="Most wall time for trials, such as 60s.  [default: 45s]")


def _share(text: str) -> float:
    """A share of "5%" or "0.05"."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ArgumentTypeError(f"{text!r} must be between 0% and 100%, such as 5%")
    return share


def _written(option: str, example: str, path: str) -> str:
    """The absolute path of a file that can be written, which is found out now and not after hours of training."""
    if path.endswith(".py"):
        raise UsageError(f"{option}={path!r} is a script. Try {option} {example} {path}.")
    with usage_errors():
        require_writable(option, path, example)
    return str(Path(path).absolute())


def watch_command(script: Sequence[str], is_module: bool, **options: Any) -> Callable[[], None]:
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


def run_command(script: Sequence[str], is_module: bool, **options: Any) -> Callable[[], None]:
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


def _launch(verb: Verb, script: Sequence[str], *, is_module: bool, **options: Any) -> Callable[[], None]:
    """What runs the script, once the command line has been read, so that nothing of ours is in its way."""
    from autotune_loader.watch.launch import launch

    target, *arguments = script[script[0] == "--" :]
    if options.get("start_with") is not None:
        from autotune_loader import TuningResult

        TuningResult.load(options["start_with"])  # an error comes now
        options["start_with"] = str(Path(options["start_with"]).absolute())
    return partial(launch, Plan(verb=verb, **options), target, arguments, is_module=is_module)


def check_command(path: str | None, strict: bool) -> int:
    """Check that a loader.json fits this machine: exit with 0 if it does, else with 5.

    Usable cores, memory, shared memory and the GPU are compared with those of
    the machine that was tuned. Less of one, or another GPU, does not fit. More
    of one, or another version of torch, is printed, and counts with --strict.
    What is unknown here is not compared, nor is the dataset, which only the job
    knows. CUDA is not initialized.

    Examples:
      autotune-loader check
      autotune-loader check --strict loader.json || exit    in a job's prologue
    """
    from autotune_loader import TuningResult

    text, is_other = _compared(TuningResult.load(path), strict=strict)
    print(text)
    return ANOTHER_MACHINE if is_other else 0


def _compared(result: Any, *, strict: bool = False) -> tuple[str, bool]:
    """How this machine differs from the one that was tuned, a line each, and whether that counts."""
    if result.machine is None:
        return "The file does not name the machine that was tuned.", False
    found = result.differences()
    is_other = any(strict or each.startswith("!") for each in found)
    told = "were tuned on another machine. Tune again here." if is_other else "fit this machine."
    return "\n".join([*found, f"The settings {told}"]), is_other


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
        print(_code_of(result, path))
    elif page is None:
        print(result.report(), _compared(result)[0], sep="\n\n")
    else:
        with usage_errors():
            require_writable("--html", page, "report.html")
        result.save_html(page)
        print(f"Written to {page}.")


def _code_of(result: Any, path: str) -> str:
    """Python that sets what was tuned; it needs nothing but torch, except for what AutoLoader has found."""
    best, order = result.best, "shuffle=True" if result.shuffle else "..."
    if result.found_by == "autoloader":
        head = f"# {best}, found by AutoLoader for its own workers\nfrom autotune_loader import AutoLoader\n\n"
        return f"{head}# loader = AutoLoader(dataset, {order}, config={path!r})"
    size = {"batch_size": batch_size} if (batch_size := best.batch_size or result.batch_size) else {}
    arguments = [f"    {name}={value!r}," for name, value in {**size, **best.to_kwargs()}.items()]
    lines = [f"# {best}", "loader_arguments = dict(", *arguments, ")"]
    lines.append(f"# loader = DataLoader(dataset, {order}, **loader_arguments)")
    if best.device_prefetch:
        lines.append("# from autotune_loader import DevicePrefetcher")
        lines.append(f"# loader = DevicePrefetcher(loader, 'cuda', depth={best.device_prefetch})")
    return "\n".join(lines)


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

    with usage_errors():  # of the budget
        return demo.tour(latency / 1000, budget)
