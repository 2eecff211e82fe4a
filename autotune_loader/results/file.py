"""`load_config()` in the training job: where it looks for `loader.json`, and how it fits the settings to the job's machine.

Reading a file needs only the standard library and `values`; `machine` is asked where the file names the machine that was tuned.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from autotune_loader.machine.facts import NO_GPU, Difference, Fingerprint, differences, inspect_machine
from autotune_loader.values import ConfigFileError, LoaderConfig, MachineMismatchError, from_plain, require_choice

_Kind = TypeVar("_Kind")
OnMismatch = Literal["fit", "strict", "ignore"]
SCHEMA_VERSION = 1
CONFIG_VARIABLE = "AUTOTUNE_LOADER_CONFIG"
"""The environment variable that names the file, for jobs that take no argument."""
FILE_NAME = "loader.json"
"""In the job's working directory."""
HOW_TO_WRITE = "Write one with tune(..., output='loader.json') or result.save('loader.json')."


def load_config(path: str | os.PathLike[str] | None = None, *, on_mismatch: OnMismatch = "fit") -> LoaderConfig:
    """Read the settings of a `loader.json`, and check them against this machine.

    Args:
        path: The file that `tune()` or `result.save()` wrote. By default the one that `AUTOTUNE_LOADER_CONFIG`
            names, else `./loader.json`.
        on_mismatch: What to do if this machine differs, in a way that matters, from the one that was tuned. `"fit"`
            warns and removes workers that fewer cores cannot feed, and what needs a GPU if there is none. `"strict"`
            raises an error. `"ignore"` returns the settings as they are. CUDA is not initialised: a GPU is seen once
            torch is imported.

    Raises:
        ConfigFileError: The file cannot be read, or does not exist; the message names its path.
        MachineMismatchError: The machines differ and `on_mismatch="strict"`.
        ValueError: `on_mismatch` is none of the three.
    """
    require_choice("on_mismatch", on_mismatch, ("fit", "strict", "ignore"))
    path = _find_file() if path is None else path
    config, tuned_on = read_json(path, lambda raw: (config_of(raw), _machine_of(raw)))
    if on_mismatch == "ignore" or tuned_on is None:
        return config
    here, found = differences_here(tuned_on)
    matters = [each.sentence for each in found if each.matters]
    if not matters:
        return config
    text = f"{os.fspath(path)} was tuned on another machine: {'; '.join(matters)}"
    if on_mismatch == "strict":
        raise MachineMismatchError(f"{text}. Tune again here, or load with on_mismatch='fit'.")
    fitted = fit(config, tuned_on, here)
    warnings.warn(text if fitted == config else f"{text}; changed to {fitted}", stacklevel=2)
    return fitted


def _find_file() -> Path:
    """What `AUTOTUNE_LOADER_CONFIG` names, else `./loader.json`."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or FILE_NAME)
    if path.is_file():
        return path
    if named:
        raise ConfigFileError(f"{CONFIG_VARIABLE}={named!r} is not a file. Unset it, or write a file there.")
    raise ConfigFileError(f"there is no {path.absolute()}, and {CONFIG_VARIABLE} is not set. {HOW_TO_WRITE}")


def differences_here(tuned_on: Fingerprint) -> tuple[Fingerprint, list[Difference]]:
    """This machine, and how it differs from the one that a file was tuned on."""
    here = inspect_machine().fingerprint(dataset=tuned_on.dataset)
    return here, differences(tuned_on, here)


def read_json(path: str | os.PathLike[str], parse: Callable[[Any], _Kind]) -> _Kind:
    """What `parse` makes of a `loader.json`.

    Raises:
        ConfigFileError: missing, not JSON, of a newer version, or `parse` refuses it.
    """
    name = f"path={os.fspath(path)!r}"
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigFileError(f"{name} cannot be read ({getattr(error, 'strerror', error)}). {HOW_TO_WRITE}") from error
    try:
        raw = json.loads(data, parse_constant=_refuse)
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"schema_version={version!r}, and this release writes {SCHEMA_VERSION}")
        if version > SCHEMA_VERSION:
            raise ConfigFileError(
                f"{name} has schema_version={version}, newer than {SCHEMA_VERSION}, which this release reads. Try a newer "
                "release of autotune_loader."
            )
        return parse(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigFileError(f"{name} is not a valid loader.json: {why.rstrip('.')}. {HOW_TO_WRITE}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number in JSON")  # it would be saved as null, which means something else


def config_of(raw: Mapping[str, Any]) -> LoaderConfig:
    """The settings that the plain values of a `loader.json` describe."""
    for_autoloader = raw.get("found_by") == "autoloader"
    values = {**raw["dataloader_kwargs"], **(raw.get("extras") or {}), "for_autoloader": for_autoloader}
    return LoaderConfig.from_dict(values)


def fit(config: LoaderConfig, tuned_on: Fingerprint, here: Fingerprint) -> LoaderConfig:
    """The configuration scaled down to a machine with fewer cores or without the GPU; never scaled up.

    The number of workers per core stays the same, but no worker goes that has a core of its own.
    """
    workers = config.num_workers
    if here.usable_cores < tuned_on.usable_cores:
        workers = max(workers * here.usable_cores // tuned_on.usable_cores, min(workers, here.usable_cores))
    config = config.with_workers(workers)
    lacks_gpu = here.gpu == NO_GPU and tuned_on.gpu not in (None, NO_GPU)
    return replace(config, pin_memory=False, device_prefetch=0) if lacks_gpu else config


def _machine_of(raw: Mapping[str, Any]) -> Fingerprint | None:
    return None if raw.get("machine") is None else from_plain(raw["machine"], Fingerprint)
