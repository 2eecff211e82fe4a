"""Results of earlier runs on disk, found again by the same workload on the same machine.

An entry is a `loader.json` that also says what was tuned, and how: data only, readable by its owner alone. Whether it still
holds is measured, not decided here. An entry that cannot be used is ignored, with a line in the log; nothing here is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import Workload
from autotune_loader.results.load import read_json
from autotune_loader.results.loader_file import ENDED, LoaderFile, checked
from autotune_loader.results.result import TuningResult
from autotune_loader.values.serialization import to_plain, write_json

log = logging.getLogger(__name__)
CACHE_VARIABLE = "AUTOTUNE_LOADER_CACHE"
"""Names another folder for the entries, or turns the cache off."""
MOST_ENTRIES = 256
"""Beyond these the entries that were used the longest ago are removed; one has some 50 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What was tuned, where, and within which limits. Code is no part of it: what that changes, the check measures."""

    machine: Fingerprint
    workload: dict[str, Any]
    """Names and sizes of dataset, batches, model and step; plain JSON values."""
    options: dict[str, Any]
    """The options of `tune()` that decide what may be chosen."""

    @classmethod
    def of(
        cls, workload: Workload, machine: Fingerprint, options: Mapping[str, Any], *, step: str, ranks: int = 1
    ) -> Identity:
        """The identity of a call of `tune()`.

        Args:
            workload: what is tuned.
            machine: the fingerprint, with the dataset's class and length.
            options: those that decide what may be chosen; plain JSON values.
            step: what is done with a batch, in words.
            ranks: of the job, on all nodes.
        """
        data, training, own = workload.data, workload.training, workload.own_config
        parts = {
            "samples": data.samples_per_epoch(),
            "batch_size": data.batch_size,
            "drop_last": data.drop_last,
            "step": step,
            "device": training.device,
            "parameters": _parameters(training.model),
            "ranks": ranks,
            "multiprocessing_context": own.multiprocessing_context if own else None,
            **names_of(data, ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")),
            **names_of(training, ("model", "train_step", "loss_fn", "optimizer")),
        }
        return cls(machine=replace(machine, driver=None), workload=parts, options=dict(options))

    @property
    def key(self) -> str:
        """Equal for equal identities, and fit for a file's name."""
        return key_of(to_plain(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What an entry says beside what every `loader.json` says."""

    identity: Identity
    tuned_at: str
    """ISO 8601, UTC."""
    budget_s: float
    max_trials: int | None = None
    was_cut_short: bool = False
    """Whether the search ended for want of time or trials, so that more of them might have found more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An earlier result."""

    result: TuningResult
    note: Note

    def is_enough_for(self, budget_s: float, max_trials: int | None = None) -> bool:
        """Whether its search had what the caller grants now, or needed no more."""
        had = self.note.max_trials
        has_trials = had is None or (max_trials is not None and max_trials <= had)
        return not self.note.was_cut_short or (budget_s <= self.note.budget_s and has_trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EntryFile(LoaderFile):
    """`loader.json` as an entry has it; other readers ignore the key that they do not know."""

    cache: Note | None = field(default=None)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the entries are: in the folder that `AUTOTUNE_LOADER_CACHE` names, else in the user's cache; None if off."""
    named = environ.get(CACHE_VARIABLE)
    if named is None:
        from platformdirs import user_cache_path

        return user_cache_path("autotune-loader", appauthor=False) / "results"
    is_off = named.strip().lower() in ("", "0", "off", "no", "none", "false")
    return None if is_off else Path(named).expanduser() / "results"


def find(identity: Identity, folder: Path | None) -> Entry | None:
    """The entry of this identity; None where there is none that can be used."""
    path = None if folder is None else folder / f"{identity.key}.json"
    if path is None or not os.path.lexists(path):
        return None
    try:
        refuse_foreign(path.lstat())
        file = read_json(path, lambda raw: checked(raw, _EntryFile, path))
        if file.cache is None or file.status not in ENDED or file.measured.samples_per_s is None:
            raise ValueError("it is no complete result of a cache")
        if file.cache.identity.key != identity.key:
            raise ValueError("it describes another workload")
    except Exception as error:  # whatever a file can hold: a cache must never be in the way
        log.warning("the earlier result %s is ignored: %s", path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now, so not the next to be removed
    return Entry(result=TuningResult.from_file(file), note=file.cache)


def keep(
    identity: Identity,
    result: TuningResult,
    folder: Path | None,
    *,
    budget_s: float,
    max_trials: int | None = None,
    cut_short: bool = False,
) -> None:
    """Keep a result whose search came to its end for the next call with this identity, in place of an older one.

    Args:
        identity: what was tuned, where, within which limits.
        result: what came of it.
        folder: of the cache; None keeps nothing.
        budget_s: wall seconds that the search had.
        max_trials: trials that it had; None for any number.
        cut_short: whether it ended for want of these.
    """
    if folder is None or result.status not in ENDED:
        return
    note = Note(
        identity=identity,
        tuned_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        budget_s=budget_s,
        max_trials=max_trials,
        was_cut_short=cut_short,
    )
    file = result.to_file()
    entry = _EntryFile(**{name: getattr(file, name) for name in LoaderFile.__dataclass_fields__}, cache=note)
    try:
        put(entry, folder, identity.key)
    except OSError as error:
        log.warning("the result is not kept for reuse: %s", error)


def put(record: Any, folder: Path, key: str) -> None:
    """Write a record into a folder of this user's own, of which only so many are kept."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(record, folder / f"{key}.json", private=True)
    remove_oldest(folder)


def refuse_foreign(status: os.stat_result) -> None:
    """Raise a ValueError for what is no file of this user's."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise ValueError("it belongs to another user")


def remove_oldest(folder: Path) -> None:
    """Keep the files that were used last, and none that was left half written."""
    changed = {path: path.stat().st_mtime for path in folder.iterdir() if path.is_file()}
    entries = [path for path in changed if re.fullmatch(r"[0-9a-f]{32}\.json", path.name)]
    # A temporary file an hour old was left by a run that was killed while it wrote.
    leftovers = [path for path in folder.glob(".*.tmp") if time.time() - changed.get(path, math.inf) > 3600]
    for path in sorted(entries, key=lambda path: changed[path], reverse=True)[MOST_ENTRIES:] + leftovers:
        path.unlink(missing_ok=True)


def key_of(facts: Any) -> str:
    """A file's name for plain JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def names_of(owner: Any, attributes: Sequence[str]) -> dict[str, str | None]:
    """What parts of a workload are called: a function's own name, an object's class; the script's for `__main__`."""
    return {each: name_of(getattr(owner, each)) for each in attributes}


def name_of(value: Any) -> str | None:
    if value is None:
        return None
    value = getattr(value, "func", value)  # functools.partial
    named = value if hasattr(value, "__qualname__") else type(value)
    module = named.__module__
    if module == "__main__":
        import __main__

        module = f"__main__({Path(getattr(__main__, '__file__', None) or 'interactive').name})"
    return f"{module}.{named.__qualname__}"


def _parameters(model: Any) -> int | None:
    """How many parameters a model has; None where it does not tell, as before a lazy module's first batch."""
    try:
        return sum(int(parameter.numel()) for parameter in model.parameters())
    except Exception:
        return None
