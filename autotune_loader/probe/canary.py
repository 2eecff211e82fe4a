"""A short look at whether a dataset may be read by several workers at all, before any of their rates is believed."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from autotune_loader.config import LoaderConfig
from autotune_loader.probe.burst import OpenLoader, make_traced_loader
from autotune_loader.probe.traced import forget_open_batch
from autotune_loader.probe.workload import DataSide

log = logging.getLogger(__name__)

TWO_WORKERS = LoaderConfig(num_workers=2, prefetch_factor=1)
# A canary that hangs must not end the study: what it would have found, a burst with a deadline finds too.
SHORTEST_TIMEOUT_S = 5.0
TIMEOUT_FACTOR = 10.0


def workers_repeat_each_other(data: DataSide, first_fetch_s: float) -> bool:
    """Whether two workers begin with the very same batch: an IterableDataset that does not share its samples out.

    Their throughput would be counted twice, and training would see every sample as often as there are workers. What
    cannot be found out (an error, a hang) counts as no.
    """
    before = {child.pid for child in multiprocessing.active_children()}
    open_loader = OpenLoader()
    first: dict[int, str] = {}
    try:
        loader = make_traced_loader(data, TWO_WORKERS, seed=0)
        loader.timeout = max(SHORTEST_TIMEOUT_S, TIMEOUT_FACTOR * first_fetch_s)
        open_loader.iterator = iter(loader)
        del loader
        for _ in range(2 * TWO_WORKERS.num_workers):
            batch, fetch = next(open_loader.iterator)
            first.setdefault(fetch[0], digest(batch))
    except StopIteration:
        pass
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        if not isinstance(error, Exception):
            raise
        log.info("the canary for repeated samples found nothing out: %s", error)
        return False
    finally:
        open_loader.close(before)
        forget_open_batch()
    return len(first) == TWO_WORKERS.num_workers and len(set(first.values())) == 1


def digest(batch: Any) -> str:
    """The same for equal batches, whatever process they come from."""
    checksum = hashlib.sha256()
    _feed(checksum, batch)
    return checksum.hexdigest()


def _feed(checksum: Any, value: Any) -> None:
    checksum.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        checksum.update(repr((plain.dtype, plain.shape)).encode())
        checksum.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _feed(checksum, key)
            _feed(checksum, part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _feed(checksum, part)
    elif hasattr(value, "tobytes"):
        checksum.update(value.tobytes())
    elif hasattr(value, "__dict__"):
        _feed(checksum, vars(value))
    else:
        checksum.update(repr(value).encode())
