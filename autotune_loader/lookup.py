"""Where `loader.json` is looked for when a job script names none: the environment, here, the user's own configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from autotune_loader.errors import ConfigFileError

# Names the file for jobs that take no argument.
CONFIG_VARIABLE = "AUTOTUNE_LOADER_CONFIG"
FILE_NAME = "loader.json"


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
