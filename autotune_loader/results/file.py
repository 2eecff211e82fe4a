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

from autotune_loader.machine.facts import NO_GPU, Difference, Fingerprint, differences, inspect_machine, visible_gpu
from autotune_loader.values import ConfigFileError, LoaderConfig, MachineMismatchError, require_choice
from autotune_loader.values.serialization import from_plain

_Kind = TypeVar("_Kind")
OnMismatch = Literal["fit", "strict", "ignore"]
SCHEMA_VERSION = 1
CONFIG_VARIABLE = "AUTOTUNE_LOADER_CONFIG"
"""The environment variable that names the file, for jobs that take no argument."""
FILE_NAME = "loader.json"
"""In the job's working directory."""
FOR_AUTOLOADER = (
    "these settings were found by AutoLoader for its own workers. Try AutoLoader(dataset, ..., config='loader.json'), "
    "`autotune-loader run --start-with loader.json train.py`, or tune() for those of DataLoader."
)
HOW_TO_WRITE = "Write one with tune(..., output='loader.json') or result.save('loader.json')."


def load_config(path: str | os.PathLike[str] | None = None, *, on_mismatch: OnMismatch = "fit") -> LoaderConfig:
    """Read the settings of a `loader.json`, and check them against this machine.

    Args:
        path: The file that `tune()` or `result.save()` wrote. By default the one that `AUTOTUNE_LOADER_CONFIG`
            names, else `./loader.json`.
        on_mismatch: What to do if this machine differs, in a way that matters, from the one that was tuned. `"fit"`
            warns and removes workers that fewer cores cannot feed, and what needs a GPU if there is none. `"strict"`
            raises an error. `"ignore"` returns the settings as they are. CUDA is not initialised: NVIDIA's driver names
            the GPU.

    Warns:
        UserWarning: The settings were fitted to this machine; or AutoLoader found them, for its own workers.

    Raises:
        ConfigFileError: The file cannot be read, or does not exist; the message names its path.
        MachineMismatchError: The machines differ and `on_mismatch="strict"`.
        ValueError: `on_mismatch` is none of the three.
    """
    config, found_by = fitted_settings(path, on_mismatch)
    if found_by == "autoloader":
        warnings.warn(FOR_AUTOLOADER, stacklevel=2)
    return config


def fitted_settings(
    path: str | os.PathLike[str] | None = None, on_mismatch: OnMismatch = "fit"
) -> tuple[LoaderConfig, str]:
    """What `load_config()` returns, and what found it, such as "tune"; a warning names the caller's caller."""
    require_choice("on_mismatch", on_mismatch, ("fit", "strict", "ignore"))
    path = find_file() if path is None else path
    config, tuned_on, found_by = read_json(path, _settings_of)
    if on_mismatch == "ignore" or tuned_on is None:
        return config, found_by
    here = _this_machine(tuned_on)
    matters = [each.sentence for each in differences(tuned_on, here) if each.matters]
    if not matters:
        return config, found_by
    text = f"{os.fspath(path)} was tuned on another machine: {'; '.join(matters)}"
    if on_mismatch == "strict":
        raise MachineMismatchError(f"{text}. Tune again here, or load with on_mismatch='fit'.")
    fitted = fit(config, tuned_on, here)
    warnings.warn(text if fitted == config else f"{text}; changed to {fitted}", stacklevel=3)
    return fitted, found_by


def find_file() -> Path:
    """What `AUTOTUNE_LOADER_CONFIG` names, else `./loader.json`."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or FILE_NAME)
    if path.is_file():
        return path
    if named:
        raise ConfigFileError(f"{CONFIG_VARIABLE}={named!r} is not a file. Unset it, or write a file there.")
    raise ConfigFileError(f"there is no {path.absolute()}, and {CONFIG_VARIABLE} is not set. {HOW_TO_WRITE}")


def differences_here(tuned_on: Fingerprint | None) -> list[Difference]:
    """How this machine differs from the one that a file was tuned on; not at all where it names none."""
    return [] if tuned_on is None else differences(tuned_on, _this_machine(tuned_on))


def _this_machine(tuned_on: Fingerprint) -> Fingerprint:
    """This machine; the dataset is not known here, and taken for the same."""
    return inspect_machine().fingerprint(dataset=tuned_on.dataset, gpu=visible_gpu())


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


def _settings_of(raw: Mapping[str, Any]) -> tuple[LoaderConfig, Fingerprint | None, str]:
    """Settings, the machine that was tuned if it is named, and what found them: of the plain values of a `loader.json`."""
    machine = None if raw.get("machine") is None else from_plain(raw["machine"], Fingerprint)
    return config_of(raw), machine, str(raw.get("found_by"))


def config_of(raw: Mapping[str, Any]) -> LoaderConfig:
    """The settings that the plain values of a `loader.json` describe."""
    return LoaderConfig.from_dict({**raw["dataloader_kwargs"], **(raw.get("extras") or {})})


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
