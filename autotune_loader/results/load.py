"""`load_config()` in the training job: where `loader.json` is looked for, and how it is fitted to the machine of the job."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.results.loader_file import config_in, read_loader_file
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError, MachineMismatchError

CONFIG_VARIABLE = "AUTOTUNE_LOADER_CONFIG"
"""Names the file for jobs that take no argument."""
FILE_NAME = "loader.json"
"""In the folder of the job, or in the user's own for settings."""


def find_loader_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The first that is there of: what `AUTOTUNE_LOADER_CONFIG` names, `./loader.json`, the user's own.

    The variable decides where it is set: a file it names that is not there is an error, not a reason to look elsewhere.

    Raises:
        ConfigFileError: there is none; the message names every place looked at.
    """
    named = environ.get(CONFIG_VARIABLE)
    if named:
        if Path(named).is_file():
            return Path(named)
        raise ConfigFileError(f"{CONFIG_VARIABLE}={named!r} names no file; unset it or write one there")
    places = (Path(FILE_NAME), user_file())
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join([f"the file that {CONFIG_VARIABLE} names (it is not set)", *(str(p.absolute()) for p in places)])
    raise ConfigFileError(
        f"no {FILE_NAME} was found; looked at: {looked}. Write one with tune(..., output='loader.json')"
    )


def user_file() -> Path:
    """The file of this user, such as `~/.config/autotune-loader/loader.json`."""
    from platformdirs import user_config_path

    return user_config_path("autotune-loader", appauthor=False) / FILE_NAME


OnMismatch = Literal["warn", "clamp", "raise"]


def load_config(path: str | os.PathLike[str] | None = None, *, on_mismatch: OnMismatch = "warn") -> LoaderConfig:
    """The configuration of a `loader.json`, checked against the machine it is loaded on.

    Args:
        path: the file that `tune()` or `result.save()` wrote. Without it: what `AUTOTUNE_LOADER_CONFIG` names, else
            `./loader.json`, else the user's own.
        on_mismatch: what to do when this machine differs from the one it was tuned on in a way that matters. `"warn"` about
            it; where it has fewer cores, and fewer than there are workers or step threads, these are reduced as well, and the
            warning says so. `"clamp"` also takes away what needs an accelerator where there is none. `"raise"`.

    Raises:
        ConfigFileError: the file cannot be read, or none was found; the message names the places.
        MachineMismatchError: the machines differ and `on_mismatch="raise"`.
        ValueError: `on_mismatch` is none of the three.
    """
    if on_mismatch not in ("warn", "clamp", "raise"):
        raise ValueError(
            f"on_mismatch={on_mismatch!r} is not 'warn', 'clamp' or 'raise'; on_mismatch='warn' would work"
        )
    path = find_loader_file() if path is None else path
    file = read_loader_file(path)
    config = config_in(file)
    if file.fingerprint is None:
        return config
    here = inspect_machine().fingerprint(dataset=file.fingerprint.dataset, storage=file.fingerprint.storage)
    found = [difference.sentence for difference in differences(file.fingerprint, here) if difference.matters]
    if not found:
        return config
    text = f"{os.fspath(path)} was tuned on another machine: {'; '.join(found)}"
    if on_mismatch == "raise":
        raise MachineMismatchError(f"{text}. Tune again here, or load with on_mismatch='clamp'")
    clamped = (clamp if on_mismatch == "clamp" else within_cores)(config, file.fingerprint, here)
    if clamped != config:
        text += f"; clamped to {clamped}"
    elif on_mismatch == "clamp":
        text += "; nothing had to be clamped"
    warnings.warn(text, stacklevel=2)
    return clamped


def within_cores(config: LoaderConfig, tuned_on: Fingerprint, here: Fingerprint) -> LoaderConfig:
    """The configuration with fewer workers and step threads where it was made for more cores than there are here.

    Workers that wait may outnumber the cores as they did there; no fewer are left than there are cores to use.
    """
    workers, threads = config.num_workers, config.consumer_threads
    if here.usable_cores < tuned_on.usable_cores:
        scaled = workers * here.usable_cores // tuned_on.usable_cores
        workers = max(scaled, min(workers, here.usable_cores))
        threads = None if threads is None else min(threads, max(1, here.usable_cores))
    return replace(config, num_workers=workers, consumer_threads=threads)


def clamp(config: LoaderConfig, tuned_on: Fingerprint, here: Fingerprint) -> LoaderConfig:
    """The configuration scaled down to a machine with fewer cores or without the accelerator; never scaled up."""
    config = within_cores(config, tuned_on, here)
    return config if here.gpus else replace(config, pin_memory=False, device_prefetch=0)
