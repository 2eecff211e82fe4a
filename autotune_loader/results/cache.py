"""Files of earlier runs in a folder of the user's own, found again by what was tuned, and where.

    results/KEY.json   what `tune()` found: a `loader.json`; whether it holds is measured before it is used
    jobs/KEY.json      what was last best for the data of a job: where an AutoLoader begins, never what it believes

They hold data only, readable by their owner alone. What cannot be used is ignored, with a line in the log; nothing here is
an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.results.load import SCHEMA_VERSION, read_json
from autotune_loader.results.loader_file import ENDED
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.serialization import to_plain, write_json

log = logging.getLogger(__name__)
_Kind = TypeVar("_Kind")
CACHE_VARIABLE = "AUTOTUNE_LOADER_CACHE"
"""Names another folder for the files, or turns the cache off."""
MOST_ENTRIES = 256
"""Beyond these the files of a folder that were used the longest ago are removed; a result has some 50 kB."""


def result_key(
    workload: Workload, machine: Fingerprint, options: Mapping[str, Any], *, step: str, ranks: int = 1
) -> str:
    """Equal for calls of `tune()` with the same answer. Code is no part of it: what that changes, the check measures.

    Args:
        workload: what is tuned.
        machine: the fingerprint, with the dataset's class and length.
        options: those that decide what may be chosen; plain JSON values.
        step: what is done with a batch, in words.
        ranks: of the job, on all nodes.
    """
    training, own = workload.training, workload.own_config
    return _key_of(
        **_facts(workload.data, machine, "collate_fn"),
        **_names_of(training, "model", "train_step", "loss_fn", "optimizer"),
        options=dict(options),
        drop_last=workload.data.drop_last,
        step=step,
        device=training.device,
        parameters=_parameters(training.model),
        ranks=ranks,
        multiprocessing_context=own.multiprocessing_context if own else None,
    )


def job_key(data: DataSide, machine: Fingerprint) -> str:
    """Equal for the same data, loaded in the same way on the same kind of machine; a loader does not know the step."""
    return _key_of(**_facts(data, replace(machine, dataset="")))


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that `AUTOTUNE_LOADER_CACHE` names, else one in the user's cache; None where it is turned off."""
    named = environ.get(CACHE_VARIABLE)
    if named is None:
        from platformdirs import user_cache_path

        return user_cache_path("autotune-loader", appauthor=False)
    is_off = named.strip().lower() in ("", "0", "off", "no", "none", "false")
    return None if is_off else Path(named).expanduser()


def find(key: str) -> TuningResult | None:
    """The result of this key; None where there is none that can be used."""

    def parse(raw: Any) -> TuningResult:
        result = TuningResult.from_dict(raw)
        if result.status not in ENDED or result.measured.samples_per_s is None or result.tuned_at is None:
            raise ValueError("it is no complete result")
        return result

    return _read("results", key, parse)


def keep(
    key: str, result: TuningResult, *, budget_s: float, max_trials: int | None = None, cut_short: bool = False
) -> None:
    """Keep a result whose search came to its end for the next call with this key, in place of an older one.

    Args:
        key: of the call.
        result: what came of it.
        budget_s: wall seconds that the search had.
        max_trials: trials that it had; None for any number.
        cut_short: whether it ended for want of these.
    """
    if result.status in ENDED:
        spent = replace(result.spent, budget_s=budget_s, max_trials=max_trials, was_cut_short=cut_short)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        _write("results", key, replace(result, tuned_at=now, spent=spent).to_dict())


def remember(key: str, config: LoaderConfig) -> None:
    """Keep what is best for a job, in place of what was before."""
    _write("jobs", key, {"schema_version": SCHEMA_VERSION, "config": config.to_dict()})


def recall(key: str) -> LoaderConfig | None:
    """What was best for a job; None where nothing is known."""
    return _read("jobs", key, lambda raw: LoaderConfig.from_dict(raw["config"]))


def _read(kind: str, key: str, parse: Callable[[Any], _Kind]) -> _Kind | None:
    """What a file of this user's holds; None where there is none that can be used."""
    folder = cache_folder()
    path = None if folder is None else folder / kind / f"{key}.json"
    if path is None or not os.path.lexists(path):
        return None
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
            raise ValueError("it is no file, or belongs to another user")
        found = read_json(path, parse)
        os.utime(path)  # used now, so not the next to be removed
    except Exception as error:  # whatever a file can hold: a cache must never be in the way
        log.warning("the file of an earlier run %s is ignored: %s", path, error)
        return None
    return found


def _write(kind: str, key: str, record: Any) -> None:
    """Put a file into a folder of which only the last used are kept; nothing where the cache is off or cannot be written."""
    cache = cache_folder()
    if cache is None:
        return
    folder = cache / kind
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(record, folder / f"{key}.json", private=True)
        by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_age[MOST_ENTRIES:]:
            path.unlink(missing_ok=True)
    except OSError as error:  # whoever tunes waits for a search again; an AutoLoader begins where it would have begun
        level = logging.WARNING if kind == "results" else logging.INFO
        log.log(level, "what was found is not kept for the next run: %s", error)


def _key_of(**facts: Any) -> str:
    """A file's name for plain JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _facts(data: DataSide, machine: Fingerprint, *more: str) -> dict[str, Any]:
    """What decides how data are loaded, and where."""
    names = _names_of(data, "dataset", "sampler", "batch_sampler", "worker_init_fn", *more)
    return {"machine": to_plain(machine), "samples": data.samples_per_epoch(), "batch_size": data.batch_size, **names}


def _names_of(owner: Any, *attributes: str) -> dict[str, str | None]:
    """What parts of a workload are called: a function's own name, an object's class; the script's for `__main__`."""
    found: dict[str, str | None] = {}
    for name in attributes:
        value = getattr(owner, name)
        value = getattr(value, "func", value)  # functools.partial
        named = value if hasattr(value, "__qualname__") else type(value)
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "interactive").name
        module = f"__main__({script})" if named.__module__ == "__main__" else named.__module__
        found[name] = None if value is None else f"{module}.{named.__qualname__}"
    return found


def _parameters(model: Any) -> int | None:
    """How many parameters a model has; None where it does not tell, as before a lazy module's first batch."""
    try:
        return sum(int(parameter.numel()) for parameter in model.parameters())
    except Exception:
        return None
