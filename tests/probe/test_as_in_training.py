"""What a burst must not change for the user's code, nor take for something else: one row for each fault met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import PreloadedPython
from torch.utils.data import DataLoader, Dataset, get_worker_info

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.opening import open_probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]
QUICK = BurstPlan(max_s=0.1, min_s=0.02, relative_error=0.5, deadline_s=60.0)


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
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset._epoch += 1
    return bool(dataset._epoch > 0) and (dataset._inner, dataset._ends) == ("mine", "mine too")


def hands_over_by_file_system() -> bool:
    return torch.multiprocessing.get_sharing_strategy() == "file_system"


BY_FILE_SYSTEM = LoaderConfig(num_workers=1, sharing_strategy="file_system")


@pytest.mark.parametrize(
    ("holds", "configs"),
    [
        (counts_its_epoch, [LoaderConfig(num_workers=1)]),
        (
            hands_over_by_file_system,
            [replace(BY_FILE_SYSTEM, multiprocessing_context=method) for method in ("spawn", "forkserver")],
        ),
    ],
    ids=["attributes of the dataset", "sharing strategy"],
)
def test_a_worker_is_as_in_training(holds: Callable[[], bool], configs: list[LoaderConfig]) -> None:
    data = DataSide.from_loader(DataLoader(Checked(holds), batch_size=4))
    with open_probe(Workload(data=data, training=TrainingSide()), inspect_machine(), "process", None) as opened:
        for config in configs:
            outcome = opened.probe.burst(config, QUICK)
            assert isinstance(outcome, Measurement), outcome
            assert outcome.bad_samples == ()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device", "/tmp/cache/x"), "user_exception"),
        (OSError(28, "No space left on device", "/dev/shm/torch_1"), "shared_memory"),
        (RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"), "shared_memory"),
    ],
)
def test_a_full_disk_is_no_full_shared_memory(error: Exception, kind: str) -> None:
    failure = failure_of(error, "batches")
    assert failure.kind == kind
    assert ("raise /dev/shm" in failure.message) == (kind == "shared_memory")


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
