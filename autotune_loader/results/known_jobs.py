"""What was last found best for the data of a job on this machine, so that an AutoLoader begins there.

One small file for each job in the folder of the cache. The step is no part of what a job is recognised by: a loader does
not know it. So what is found here is where to begin, never what to believe.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.results.cache import cache_folder, name_of, put, refuse_foreign
from autotune_loader.results.loader_file import SCHEMA_VERSION, read_loader_json
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.serialization import to_plain

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """One file."""

    schema_version: str
    config: dict[str, Any]


def job_key(data: DataSide, machine: Fingerprint) -> str:
    """Equal for the same data, loaded in the same way on the same kind of machine."""
    parts = {name: name_of(getattr(data, name)) for name in ("dataset", "sampler", "batch_sampler", "worker_init_fn")}
    facts = {
        "machine": to_plain(replace(machine, driver=None, dataset="", storage="")),
        "samples": data.samples_per_epoch(),
        "batch_size": data.batch_size,
        **parts,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def remember(key: str, config: LoaderConfig) -> None:
    """Keep what is best for a job, in place of what was before; nothing where the cache is off or cannot be written."""
    folder = _folder()
    if folder is None:
        return
    try:
        put(KnownJob(schema_version=SCHEMA_VERSION, config=config.to_dict()), folder, key)
    except OSError as error:
        log.info("the configuration is not kept for the next job: %s", error)


def recall(key: str) -> LoaderConfig | None:
    """What was best for a job; None where nothing is known."""
    folder = _folder()
    if folder is None:
        return None
    path = folder / f"{key}.json"
    try:
        refuse_foreign(path.lstat())
        return read_loader_json(path, lambda raw: LoaderConfig.from_dict(raw["config"]))
    except OSError:
        return None
    except Exception as error:  # whatever a file can hold: a cache must never be in the way
        log.warning("what is known of this job, %s, is ignored: %s", path, error)
        return None


def _folder() -> Path | None:
    results = cache_folder()
    return None if results is None else results.parent / "jobs"
