"""What a burst must not change for the user's code, nor take for something else: one row for each fault met."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import PreloadedPython
from torch.utils.data import Dataset, get_worker_info

from autotune_loader.probe.failures import failure_of
from autotune_loader.values.config import LoaderConfig
from tests.support.bursts import ONE_WORKER, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Checked(Dataset[torch.Tensor]):
    """Raises in a worker where what is checked there does not hold."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._epoch = 0
        self._inner, self._ends = "mine", "mine too"
        self.holds = holds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None and not self.holds():
            raise LookupError("not as in training")
        return torch.zeros(2)


def counts_its_epoch() -> bool:
    dataset: Any = get_worker_info().dataset
    dataset._epoch += 1
    return bool(dataset._epoch > 0) and (dataset._inner, dataset._ends) == ("mine", "mine too")


def hands_over_by_file_system() -> bool:
    return torch.multiprocessing.get_sharing_strategy() == "file_system"


BY_FILE_SYSTEM = LoaderConfig(num_workers=1, sharing_strategy="file_system", multiprocessing_context="spawn")


@pytest.mark.parametrize(
    ("holds", "config"),
    [(counts_its_epoch, ONE_WORKER), (hands_over_by_file_system, BY_FILE_SYSTEM)],
    ids=["attributes of the dataset", "sharing strategy"],
)
def test_a_worker_is_as_in_training(holds: Callable[[], bool], config: LoaderConfig) -> None:
    with opened(workload(Checked(holds))) as probe:
        assert measured(probe.probe, config).bad_samples == ()


SHM = "raise /dev/shm"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (OSError(28, "No space left on device", "/tmp/cache/x"), "user_exception", "a disk is full"),
        (OSError(28, "No space left on device", "/dev/shm/torch_1"), "shared_memory", SHM),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), "shared_memory", SHM),
        # a second process does not fit the GPU
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "device_memory", "train_step=0.05"),
        (RuntimeError("CUDA error: all CUDA devices are busy or unavailable"), "user_exception", "train_step=0.05"),
    ],
)
def test_an_error_is_taken_for_what_it_is_and_says_what_helps(error: Exception, kind: str, says: str) -> None:
    failure = failure_of(error, "batches")
    assert failure.kind == kind
    assert says in failure.message
    assert kind == "shared_memory" or SHM not in failure.message


SIGNALLED = """
import faulthandler, os, signal, sys, torch
from autotune_loader import tune
faulthandler.register(signal.SIGUSR2, file=sys.stdout)
tune(list(torch.zeros(64, 2)), batch_size=4, budget=1, max_trials=1, isolation="inline", reuse=False, progress=False)
os.kill(os.getpid(), signal.SIGUSR2)
print("lives")
"""


def test_a_signal_that_is_listened_to_in_c_still_is_after_an_inline_run(
    tmp_path: Path, preloaded: PreloadedPython
) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    run = preloaded.start("signalled.py", folder=tmp_path)
    assert run.wait(timeout=120) == 0, run.output
    assert "lives" in run.output
    assert "File" in run.output, "the handler has printed where the process was"
