"""Threads of a step on the CPU: they are the process', and a loader sets them only where it was asked to."""

from __future__ import annotations

import torch

from autotune_loader.decision.space import consumer_thread_counts
from autotune_loader.values.config import LoaderConfig


class StepThreads:
    """Sets torch's intra-op threads of this process to what a configuration wants.

    Args:
        cores: that may be counted on.
    """

    def __init__(self, cores: int) -> None:
        self._default = torch.get_num_threads()
        self.counts = consumer_thread_counts(cores, self._default)
        """What may be tried; None for the threads that the process had."""

    def set(self, config: LoaderConfig) -> None:
        """Take up the threads of a configuration that has begun to serve."""
        threads = config.consumer_threads or self._default
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
