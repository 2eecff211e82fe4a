"""The one place that builds a DataLoader."""

from __future__ import annotations

import os
import warnings

from autotune_loader.pipeline.build import build_loader
from autotune_loader.values.config import LoaderConfig


def test_more_workers_than_cores_were_measured_so_torch_does_not_warn() -> None:
    beyond = len(os.sched_getaffinity(0)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = build_loader([0, 1, 2, 3], LoaderConfig(num_workers=beyond))
    assert loader.num_workers == beyond
