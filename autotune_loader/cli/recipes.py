"""A result in the form that a training job takes: pure functions from a result to text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_loader.results.load import CONFIG_VARIABLE

if TYPE_CHECKING:
    from autotune_loader.results.result import TuningResult


def kwargs_recipe(result: TuningResult) -> str:
    """Arguments for `torch.utils.data.DataLoader`, as JSON."""
    return json.dumps(_loader_arguments(result), indent=2)


def env_recipe(result: TuningResult, path: str) -> str:
    """Lines for a shell: where `load_config()` finds the file, and OMP_NUM_THREADS where the step's threads were tuned."""
    values = {CONFIG_VARIABLE: str(Path(path).absolute())}
    if result.best.consumer_threads is not None:
        values["OMP_NUM_THREADS"] = str(result.best.consumer_threads)
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


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


def hf_recipe(result: TuningResult) -> str:
    """Fields of `transformers.TrainingArguments`, and what has no field there."""
    best = result.best
    named = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    fields: dict[str, Any] = {f"dataloader_{name}": getattr(best, name) for name in named}
    if best.drop_last is not None:
        fields["dataloader_drop_last"] = best.drop_last
    if best.batch_size is not None:
        fields["per_device_train_batch_size"] = best.batch_size
    missing = {
        name: best.to_kwargs()[name] for name in ("in_order", "multiprocessing_context") if name in best.to_kwargs()
    }
    notes = [f"# TrainingArguments has no field for {name}={value!r}." for name, value in missing.items()]
    usage = "# TrainingArguments(..., **LOADER_FIELDS)"
    return _after_settings(result, [*notes, usage, f"LOADER_FIELDS = {_python_dict(fields)}"])


def lightning_recipe(result: TuningResult) -> str:
    """A DataLoader's arguments for a LightningModule or LightningDataModule."""
    lines = [
        "# In train_dataloader(): return DataLoader(dataset, batch_size=..., shuffle=True, **LOADER_ARGUMENTS)",
        "# Trainer(...) needs no change: it keeps these arguments, and num_workers is for each process (device).",
        f"LOADER_ARGUMENTS = {_python_dict(_loader_arguments(result))}",
    ]
    return _after_settings(result, lines)


def accelerate_recipe(result: TuningResult) -> str:
    """A DataLoader's arguments to be prepared by accelerate, and its configuration."""
    config = {"non_blocking": result.best.pin_memory}
    lines = [
        "# loader = DataLoader(dataset, batch_size=..., shuffle=True, **LOADER_ARGUMENTS)",
        "# accelerator = Accelerator(dataloader_config=DATALOADER_CONFIG); loader = accelerator.prepare(loader)",
        "# prepare() keeps these arguments, and num_workers is for each process.",
        f"LOADER_ARGUMENTS = {_python_dict(_loader_arguments(result))}",
        f"DATALOADER_CONFIG = DataLoaderConfiguration(**{config!r})  # copies overlap the step where memory is pinned",
    ]
    return _after_settings(result, lines, imports=["from accelerate import DataLoaderConfiguration", ""])


RECIPES: Mapping[str, Callable[[TuningResult], str]] = {  # what `apply --to` makes of a result; `env` needs its file
    "kwargs": kwargs_recipe,
    "snippet": snippet_recipe,
    "hf": hf_recipe,
    "lightning": lightning_recipe,
    "accelerate": accelerate_recipe,
}
# Without workers torch refuses or ignores them.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "in_order", "multiprocessing_context")


def _loader_arguments(result: TuningResult) -> dict[str, Any]:
    size = {"batch_size": result.best.batch_size} if result.best.batch_size is not None else {}
    return {**size, **result.best.to_kwargs()}


def _after_settings(result: TuningResult, lines: Sequence[str], imports: Sequence[str] = ()) -> str:
    """The lines, after imports and the settings of the process, where there are any."""
    settings = _process_settings(result)
    return "\n".join([*(["import torch", ""] if settings else []), *imports, *settings, *lines])


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
