"""Exceptions of the package, all of them public.

    TunerError                      everything below, in one `except`
     +- WorkloadError               the user's dataset, model or step raised
     +- ConfigFileError             a `loader.json` cannot be read
     +- MachineMismatchError        a `loader.json` is of another machine, with `on_mismatch="strict"`
     +- PlatformError               another operating system than Linux; also an `ImportError`
     +- MissingExtraError           a package is not installed; also an `ImportError`

A wrong argument is a `ValueError` or `TypeError`. A trial that fails is no exception but a `Failure` (`measurement.py`),
because the study goes on.
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
    """A feature needs a package that is not installed; the message has the pip install line.

    Args:
        feature: What was asked for, as the message begins.
        package: The package that is missing.
        extra: The extra of autotune-loader that brings it.
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}. Install it with: pip install 'autotune-loader[{extra}]'")
