"""One file for machines of several kinds: an entry for each, found again by the fingerprint of the machine that loads it.

    {"schema_version": "1.0", "entries": [{... a loader.json ...}, {... another ...}]}

Every host adds its own entry; a training job loads the collection as it would load a `loader.json`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import Fingerprint, Machine
from autotune_loader.results.loader_file import SCHEMA_VERSION, LoaderFile, config_in, read_loader_json
from autotune_loader.results.result import TuningResult
from autotune_loader.values.errors import ConfigFileError
from autotune_loader.values.serialization import from_plain, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A collection file."""

    schema_version: str
    entries: tuple[LoaderFile, ...]
    """One for each kind of machine and dataset."""


def add_to_fleet(path: str | os.PathLike[str], result: TuningResult) -> None:
    """Add a result to a collection, in place of an entry for the same kind of machine; the file is made if need be.

    Several hosts may add at once: they take turns, through a lock file beside the collection.

    Raises:
        ConfigFileError: the file is there and is no collection.
        ValueError: the result carries no fingerprint to find it by.
    """
    if result.fingerprint is None:
        raise ValueError("result has no fingerprint, so no machine would find it; a result of tune() would work")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(target):
        before = read_entries(target) if target.exists() else ()
        kept = tuple(entry for entry in before if not _same_kind(entry.fingerprint, result.fingerprint))
        write_json(Fleet(schema_version=SCHEMA_VERSION, entries=(*kept, result.to_file())), target)


def read_entries(path: str | os.PathLike[str]) -> tuple[LoaderFile, ...]:
    """The entries of a collection; a plain `loader.json` is a collection of one.

    Raises:
        ConfigFileError: it cannot be read.
    """

    def parse(raw: Any) -> tuple[LoaderFile, ...]:
        entries = from_plain(raw, Fleet).entries if "entries" in raw else (from_plain(raw, LoaderFile),)
        for entry in entries:
            config_in(entry)
        return entries

    return read_loader_json(path, parse)


def entry_for(path: str | os.PathLike[str], machine: Machine, *, dataset: str | None = None) -> LoaderFile:
    """The entry that was tuned on a machine most like this one.

    Args:
        path: of the collection, or of a plain `loader.json`.
        machine: this one.
        dataset: where entries for several datasets are kept, the one that is meant, as the fingerprint names it.

    Raises:
        ConfigFileError: it cannot be read, is empty, or has nothing for that dataset.
    """
    entries = read_entries(path)
    nearest = nearest_entry(entries, machine, dataset=dataset)
    if nearest is None:
        known = ", ".join(sorted({entry.fingerprint.dataset for entry in entries if entry.fingerprint})) or "nothing"
        raise ConfigFileError(f"path={os.fspath(path)!r} has no entry for dataset={dataset!r}; it has {known}")
    return nearest


def nearest_entry(entries: Sequence[LoaderFile], machine: Machine, *, dataset: str | None = None) -> LoaderFile | None:
    """The one of some entries that was tuned on a machine most like this one; None where there is none for the dataset."""
    wanted = [
        entry
        for entry in entries
        if dataset is None or entry.fingerprint is None or entry.fingerprint.dataset == dataset
    ]
    return min(wanted, key=lambda entry: _distance(entry.fingerprint, machine), default=None)


def _distance(tuned: Fingerprint | None, machine: Machine) -> tuple[float, float, float]:
    """First by what matters, then by every difference, then by cores: 16 are fine on 128, but 64 are better."""
    if tuned is None:
        return math.inf, 0, 0
    found = differences(tuned, machine.fingerprint(dataset=tuned.dataset, storage=tuned.storage))
    cores = abs(math.log(machine.usable_cores / max(1, tuned.usable_cores)))
    return sum(difference.matters for difference in found), len(found), cores


def _same_kind(one: Fingerprint | None, other: Fingerprint) -> bool:
    """Whether an entry of one would be replaced by one of the other: nothing that matters differs, either way round."""
    if one is None or one.dataset != other.dataset:
        return False
    return not any(difference.matters for difference in (*differences(one, other), *differences(other, one)))


@contextlib.contextmanager
def _only_writer(target: Path) -> Iterator[None]:
    import fcntl

    with target.with_name(f".{target.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
