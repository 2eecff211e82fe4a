"""What can go wrong through no fault of the tuner's caller arguments.

A wrong argument stays a plain `ValueError` or `TypeError`. A configuration that fails during the study is no exception at
all: it is a `Failure` (see `measurement.py`), because the study goes on.
"""

from __future__ import annotations


class TunerError(Exception):
    """Base class of all errors of autotune_loader."""


class WorkloadError(TunerError):
    """The user's dataset, model or step raised an exception; it has the user's traceback."""

    def __init__(self, message: str, user_traceback: str = "") -> None:
        self.message = message
        self.user_traceback = user_traceback
        # A traceback ends with what the message says: once is enough.
        super().__init__(f"{message}\n\n{self.user_traceback.rstrip().removesuffix(message)}".rstrip())


class ConfigFileError(TunerError):
    """A `loader.json` cannot be read: it is missing, corrupt, of a newer version, or another kind of file."""


class MachineMismatchError(TunerError):
    """A `loader.json` of another machine was loaded with `on_mismatch="strict"`."""


class PlatformError(TunerError, ImportError):
    """Tuning is not supported on this operating system.

    It is an ImportError, so that a script can fall back on `DataLoader`.
    """


class MissingExtraError(TunerError, ImportError):
    """A feature needs packages that are not installed; the message has the pip install line."""

    def __init__(self, feature: str, *packages: str) -> None:
        line = " ".join(f"'{each}'" for each in packages)
        super().__init__(f"{feature} needs {', '.join(packages)}. Install it with: pip install {line}")
