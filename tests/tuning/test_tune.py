"""`tune()` from call to file, on simulated machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import LoaderConfig, TuningResult, load_config, tune
from autotune_loader.diagnosis import Caution
from autotune_loader.search.sampler import TwinSampler
from autotune_loader.tuning.study import CHOSEN
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BurstPlan, Failure, Measurement
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, on_simulated_machines

ROWS = TensorDataset(torch.zeros(100_000, 3), torch.zeros(100_000, dtype=torch.long))
MACHINE = SimulatedMachine(batch_size=8, step_s=0.005)
seen = list[SimulatedProbe]()


def probe_on(machine: SimulatedMachine, clock: FakeClock, **more: Any) -> SimulatedProbe:
    seen.append(SimulatedProbe(machine, clock, **more))
    return seen[-1]


def tuned(monkeypatch: pytest.MonkeyPatch, data: Any = ROWS, probe: Any = probe_on, **given: Any) -> TuningResult:
    on_simulated_machines(monkeypatch, lambda workload: MACHINE, probe)
    options = {"progress": False} if isinstance(data, DataLoader) else {"batch_size": 8, "progress": False}
    return tune(data, torch.nn.Linear(3, 2), **options, **given)


class NeverIterated(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the user's own loader must never be iterated")


def test_a_loader_is_the_baseline_and_result_and_file_make_the_same_one_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a loader that must not be iterated
    loader, path = NeverIterated(ROWS, batch_size=8, num_workers=1, prefetch_factor=3), tmp_path / "loader.json"
    # WHEN it is tuned
    result = tuned(monkeypatch, loader, output=path)
    # THEN it is what the choice is compared with
    assert (result.baseline.num_workers, result.baseline.prefetch_factor) == (1, 3)
    assert (result.trials[0].config, result.batch_size) == (result.baseline, 8)
    # AND what is written is what was measured: the best, exactly as it is told, ran in the rounds
    assert result.best in {trial.config for trial in result.trials if trial.round is not None}
    assert load_config(path) == result.best
    made = result.make_loader(ROWS, shuffle=True)
    assert LoaderConfig.from_loader(made) == result.best
    # AND only a loader that shuffles is given back shuffled
    assert (result.shuffle, tuned(monkeypatch).shuffle) == (False, False)
    assert tuned(monkeypatch, DataLoader(ROWS, batch_size=8, shuffle=True)).shuffle
    written = TuningResult.load(path)
    assert (written.best, written.status, len(written.trials)) == (result.best, result.status, len(result.trials))


def test_what_a_file_that_fits_has_found_is_tried_first_and_another_jobs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, odd = tmp_path / "loader.json", LoaderConfig(num_workers=7, prefetch_factor=5, persistent_workers=True)
    earlier = tuned(monkeypatch, output=path)

    def tried(**changes: Any) -> list[LoaderConfig]:
        from dataclasses import replace

        replace(earlier, best=odd, **changes).save(path)
        return [trial.config for trial in tuned(monkeypatch, output=path).trials if trial.round is None]

    assert tried()[:2] == [LoaderConfig(), odd]
    assert odd not in tried(batch_size=16)
    assert odd not in tried(machine=None)
    # AND what is no result is written over
    path.write_text("{}")
    assert TuningResult.load(path) if tuned(monkeypatch, output=path) else None


def test_the_study_of_the_user_is_gone_on_with_and_told_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({"num_workers": 5, "prefetch_factor": 2})
    result = tuned(monkeypatch, study=study)
    assert result.study is study
    assert study.trials[0].params == {"num_workers": 5, "prefetch_factor": 2}
    assert LoaderConfig.from_dict(study.user_attrs[CHOSEN]) == result.best
    assert isinstance(study.sampler, TwinSampler)


class Ending(SimulatedProbe):
    """Ends its fourth burst by what it is told to raise."""

    raised: BaseException

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        if len(self.bursts) == 3:
            raise self.raised
        return super().burst(config, plan)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkloadError("sample 40 raises ValueError: no")], ids=repr)
def test_ctrl_c_keeps_what_was_measured_and_a_sample_that_raises_ends_the_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(Ending, "raised", error, raising=False)
    path, study = tmp_path / "loader.json", optuna.create_study(direction="maximize")
    path.write_text("{}")  # of before
    if isinstance(error, WorkloadError):
        with pytest.raises(WorkloadError, match="sample 40 raises ValueError: no"):
            tuned(monkeypatch, probe=Ending, output=path, study=study)
        assert path.read_text() == "{}"
    else:
        result = tuned(monkeypatch, probe=Ending, output=path, study=study)
        assert (result.status, len(result.trials)) == ("partial", 3)
        assert TuningResult.load(path).status == "partial"
        assert "interrupted" in result.report()
    assert all(each.state.is_finished() for each in study.trials)


def test_an_output_that_cannot_be_written_is_refused_at_once_and_a_disk_that_fills_up_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").touch()
    for place in (tmp_path, tmp_path / "a-file" / "loader.json"):
        with pytest.raises(ValueError, match=r"cannot be written .*output='loader.json' would work"):
            tune(ROWS, batch_size=8, output=place)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TuningResult, "save", no_space)
    result = tuned(monkeypatch, output=tmp_path / "x.json")
    assert Caution.NOT_WRITTEN.said_by(result.warnings[-1])
    assert result.rate is not None
