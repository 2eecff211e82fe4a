"""`load_config()` in the training job: where `loader.json` is looked for, and how it is fitted to the machine of the job.

Only the standard library and `values` are needed to read a file; `machine` is asked where the file says on which it was tuned.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError, MachineMismatchError
from autotune_loader.values.validation import require_choice

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Fingerprint

_Kind = TypeVar("_Kind")
OnMismatch = Literal["warn", "clamp", "raise"]
# 1.x  before the first release: more fields, the same meaning of those that are left
# 2.0  first release
SCHEMA_VERSION = "2.0"
MAX_FILE_BYTES = 32 << 20
"""No honest loader.json comes near this; a file that does is refused before it is parsed."""
CONFIG_VARIABLE = "AUTOTUNE_LOADER_CONFIG"
"""Names the file for jobs that take no argument."""
FILE_NAME = "loader.json"
"""In the folder of the job, or in the user's own for settings."""
HOW_TO_WRITE = "write one with tune(..., output='loader.json') or result.save('loader.json')"


def find_loader_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The first that is there of: what `AUTOTUNE_LOADER_CONFIG` names, `./loader.json`, the user's own.

    The variable decides where it is set: a file it names that is not there is an error, not a reason to look elsewhere.

    Raises:
        ConfigFileError: there is none; the message names every place looked at.
    """
    named = environ.get(CONFIG_VARIABLE)
    places = (Path(named),) if named else (Path(FILE_NAME), user_file(environ))
    for place in places:
        if place.is_file():
            return place
    if named:
        raise ConfigFileError(f"{CONFIG_VARIABLE}={named!r} names no file; unset it or write one there")
    looked = ", ".join([f"the file that {CONFIG_VARIABLE} names (it is not set)", *(str(p.absolute()) for p in places)])
    raise ConfigFileError(f"no {FILE_NAME} was found; looked at: {looked}; {HOW_TO_WRITE}")


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The file of this user: `$XDG_CONFIG_HOME/autotune-loader/loader.json`, by default in `~/.config`."""
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "autotune-loader" / FILE_NAME


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
    require_choice("on_mismatch", on_mismatch, ("warn", "clamp", "raise"))
    path = find_loader_file() if path is None else path
    config, elsewhere = read_json(path, lambda raw: (config_of(raw), _elsewhere(raw)))
    if elsewhere is None:
        return config
    tuned_on, here, found = elsewhere
    text = f"{os.fspath(path)} was tuned on another machine: {'; '.join(found)}"
    if on_mismatch == "raise":
        raise MachineMismatchError(f"{text}. Tune again here, or load with on_mismatch='clamp'")
    fitted = clamp(config, tuned_on, here, cores_only=on_mismatch == "warn")
    warnings.warn(text if fitted == config else f"{text}; clamped to {fitted}", stacklevel=2)
    return fitted


def read_json(path: str | os.PathLike[str], parse: Callable[[Any], _Kind]) -> _Kind:
    """What `parse` makes of a JSON file of ours, after its size and version were checked.

    Raises:
        ConfigFileError: missing, too large, not JSON, of a newer major version, or nothing that `parse` takes.
    """
    name = f"path={os.fspath(path)!r}"
    try:
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigFileError(f"{name} has {size} bytes, more than any loader.json ({MAX_FILE_BYTES})")
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigFileError(f"{name} cannot be read ({getattr(error, 'strerror', error)}); {HOW_TO_WRITE}") from error
    try:
        raw = json.loads(data, parse_constant=_refuse)
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        major = str(version).split(".", 1)[0]
        if not isinstance(version, str) or not major.isdecimal():
            raise ValueError(f"schema_version={version!r}, and this release writes {SCHEMA_VERSION!r}")
        if int(major) > int(SCHEMA_VERSION.split(".", 1)[0]):
            raise ConfigFileError(
                f"{name} has schema_version={version!r}, newer than {SCHEMA_VERSION!r}, which this release reads; "
                "upgrade with: pip install -U autotune-loader"
            )
        return parse(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigFileError(f"{name} is not a valid loader.json: {why}; {HOW_TO_WRITE}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")  # read, it would be saved as null, which is another thing


def config_of(raw: Mapping[str, Any]) -> LoaderConfig:
    """The configuration that the plain values of a `loader.json` describe."""
    size = raw.get("batch_size") or {}
    tuned_size = {"batch_size": size["value"]} if size.get("tuned") else {}
    return LoaderConfig.from_dict({**raw["dataloader_kwargs"], **(raw.get("extras") or {}), **tuned_size})


def clamp(config: LoaderConfig, tuned_on: Fingerprint, here: Fingerprint, *, cores_only: bool = False) -> LoaderConfig:
    """The configuration scaled down to a machine with fewer cores or without the accelerator; never scaled up.

    Workers that wait may outnumber the cores as they did there; no fewer are left than there are cores to use.
    """
    workers, threads = config.num_workers, config.consumer_threads
    if here.usable_cores < tuned_on.usable_cores:
        scaled = workers * here.usable_cores // tuned_on.usable_cores
        workers = max(scaled, min(workers, here.usable_cores))
        threads = None if threads is None else min(threads, max(1, here.usable_cores))
    config = replace(config, num_workers=workers, consumer_threads=threads)
    return config if here.gpus or cores_only else replace(config, pin_memory=False, device_prefetch=0)


def _elsewhere(raw: Mapping[str, Any]) -> tuple[Fingerprint, Fingerprint, list[str]] | None:
    """The machines of then and now, and what differs in a way that matters; None where nothing does, or no machine is named."""
    if (told := raw.get("fingerprint")) is None:
        return None
    from autotune_loader.machine.comparison import differences
    from autotune_loader.machine.facts import Fingerprint, inspect_machine

    known = {each.name: told[each.name] for each in fields(Fingerprint) if each.name in told}
    tuned_on = Fingerprint(**{**known, "gpus": tuple(known.get("gpus") or ())})
    if not isinstance(tuned_on.usable_cores, int) or tuned_on.usable_cores < 1:
        raise ValueError(f"fingerprint.usable_cores={tuned_on.usable_cores!r} is no number of cores")
    here = inspect_machine().fingerprint(dataset=tuned_on.dataset)
    found = [difference.sentence for difference in differences(tuned_on, here) if difference.matters]
    return (tuned_on, here, found) if found else None
