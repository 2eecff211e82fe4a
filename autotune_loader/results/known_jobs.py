"""What was last found best for the data of a job on this machine: where an AutoLoader begins, never what it believes.

One small file for each job in the folder of the cache. The step is no part of a job's key: a loader does not know it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.results.cache import cache_folder, key_of, names_of, put, refuse_foreign
from autotune_loader.results.load import SCHEMA_VERSION, read_json
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
    return key_of(
        {
            "machine": to_plain(replace(machine, driver=None, dataset="", storage="")),
            "samples": data.samples_per_epoch(),
            "batch_size": data.batch_size,
            **names_of(data, ("dataset", "sampler", "batch_sampler", "worker_init_fn")),
        }
    )


def remember(key: str, config: LoaderConfig) -> None:
    """Keep what is best for a job, in place of what was before; nothing where the cache is off or cannot be written."""
    try:
        if (folder := _folder()) is not None:
            put(KnownJob(schema_version=SCHEMA_VERSION, config=config.to_dict()), folder, key)
    except OSError as error:
        log.info("the configuration is not kept for the next job: %s", error)


def recall(key: str) -> LoaderConfig | None:
    """What was best for a job; None where nothing is known."""
    if (folder := _folder()) is None:
        return None
    path = folder / f"{key}.json"
    try:
        refuse_foreign(path.lstat())
        return read_json(path, lambda raw: LoaderConfig.from_dict(raw["config"]))
    except OSError:
        return None
    except Exception as error:  # whatever a file can hold: a cache must never be in the way
        log.warning("what is known of this job, %s, is ignored: %s", path, error)
        return None


def _folder() -> Path | None:
    results = cache_folder()
    return None if results is None else results.parent / "jobs"
