"""The configuration of a `loader.json` in the training job, fitted to the machine that the job runs on."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Literal

from autotune_loader.config import LoaderConfig
from autotune_loader.errors import MachineMismatchError
from autotune_loader.fleet import entry_for
from autotune_loader.loader_file import config_in
from autotune_loader.lookup import find_loader_file
from autotune_loader.machine.facts import Fingerprint, differences, inspect_machine

OnMismatch = Literal["warn", "clamp", "raise"]


def load_config(path: str | os.PathLike[str] | None = None, *, on_mismatch: OnMismatch = "warn") -> LoaderConfig:
    """The configuration of a `loader.json`, checked against the machine it is loaded on.

    Args:
        path: the file that `tune()` or `result.save()` wrote, or a collection (see `fleet`), of which the entry nearest to
            this machine is taken. Without it: what `AUTOTUNE_LOADER_CONFIG` names, else `./loader.json`, else the user's own.
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
    path, machine = find_loader_file() if path is None else path, inspect_machine()
    file = entry_for(path, machine)
    config = config_in(file)
    if file.fingerprint is None:
        return config
    here = machine.fingerprint(dataset=file.fingerprint.dataset, storage=file.fingerprint.storage)
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
