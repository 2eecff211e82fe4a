"""A result in the form that a training job takes: pure functions from a result to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult


def kwargs_recipe(result: TuningResult) -> str:
    """Arguments for `torch.utils.data.DataLoader`, as JSON."""
    return json.dumps(_loader_arguments(result), indent=2)


def snippet_recipe(result: TuningResult) -> str:
    """Python that makes the loader and needs nothing but torch."""
    settings, depth = _process_settings(result), result.best.device_prefetch
    note = f"# from autotune_loader import DevicePrefetcher; loader = DevicePrefetcher(loader, 'cuda', depth={depth})"
    lines = [
        f"# {result.best}; written by autotune-loader",
        *(["import torch"] if settings else []),
        "from torch.utils.data import DataLoader",
        "",
        *settings,
        f"LOADER_ARGUMENTS = {_python_dict(_loader_arguments(result))}",
        "",
        "",
        "def make_loader(dataset, **arguments):",
        '    """A tuned DataLoader; `arguments` such as batch_size and shuffle come on top and win."""',
        "    arguments = {**LOADER_ARGUMENTS, **arguments}",
        '    if arguments["num_workers"] == 0:  # what only workers have goes with them',
        f"        arguments = {{name: value for name, value in arguments.items() if name not in {_OF_WORKERS!r}}}",
        "    return DataLoader(dataset, **arguments)",
        *(["", "", note] if depth else []),
    ]
    return "\n".join(lines)


RECIPES: Mapping[str, Callable[[TuningResult], str]] = {  # what `apply --to` makes of a result
    "kwargs": kwargs_recipe,
    "snippet": snippet_recipe,
}
# Without workers torch refuses or ignores them.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "in_order", "multiprocessing_context")


def _loader_arguments(result: TuningResult) -> dict[str, Any]:
    size = {"batch_size": result.best.batch_size} if result.best.batch_size is not None else {}
    return {**size, **result.best.to_kwargs()}


def _process_settings(result: TuningResult) -> list[str]:
    """Statements for what is no argument of DataLoader but a setting of the training process."""
    best, lines = result.best, []
    if best.consumer_threads is not None:
        lines.append(f"torch.set_num_threads({best.consumer_threads})  # once, before the training loop")
    if best.sharing_strategy is not None:
        lines.append(f"torch.multiprocessing.set_sharing_strategy({best.sharing_strategy!r})")
    return [*lines, ""] if lines else []


def _python_dict(values: Mapping[str, Any]) -> str:
    return "{\n" + "".join(f"    {json.dumps(name)}: {value!r},\n" for name, value in values.items()) + "}"
