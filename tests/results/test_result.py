"""`TuningResult` and `loader.json`: what is saved comes back, and a file that is not right says what is wrong."""

from __future__ import annotations

import json
import math
import re
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.results.load import MAX_FILE_BYTES, clamp, load_config
from autotune_loader.results.loader_file import (
    Advice,
    BatchSizeChoice,
    Finals,
    Measured,
    Reused,
    Spent,
    Verdict,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.assemble import loader_parts
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError, MachineMismatchError
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_result
from tests.support.schema import loader_schema

REPOSITORY = Path(__file__).parents[2]
OLD_FILE = Path(__file__).parent / "data" / "loader-1.0.json"
SCHEMA_FILE = REPOSITORY / "docs" / "loader.schema.json"

BEST = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True, consumer_threads=1)
HERE = Fingerprint(usable_cores=4, memory_bytes=8 << 30, torch="2.13.0", start_method="fork")


def interval(value, low=None, high=None, count=9):
    return Interval(
        value=value, low=value * 0.98 if low is None else low, high=value * 1.02 if high is None else high, count=count
    )


def finished_run():
    """A result with every field filled, as after a whole run."""
    probe = SimulatedProbe(SimulatedMachine(), FakeClock())
    plan = BurstPlan(max_s=0.5, min_s=0.2)
    failure = Failure(
        kind="user_exception",
        phase="batches",
        message="cannot open 'bad-\udcff.jpg'",
        traceback="Traceback (most recent call last): ...",
    )
    trials = (
        Trial(number=0, config=LoaderConfig(), role="baseline", measurement=probe.burst(LoaderConfig(), plan)),
        Trial(number=1, config=BEST, role="search", measurement=probe.burst(BEST, plan), seconds=1.5),
        Trial(number=2, config=LoaderConfig(num_workers=8), role="search", failure=failure),
    )
    return TuningResult(
        best=BEST,
        status="complete",
        baseline=LoaderConfig(),
        trials=trials,
        batch_size=BatchSizeChoice(value=32),
        measured=Measured(samples_per_s=interval(800.0), speedup=interval(2.0), wait_share=0.25),
        verdict=Verdict(binding="cpu", sentence="The CPU binds.", headroom=0.5),
        advice=(Advice(action="Do less.", reason="It is much.", expected_gain=0.5),),
        summary=("Use 3 workers.",),
        warnings=("The machine was busy.",),
        finals=Finals(configs=(BEST, LoaderConfig()), rounds=((800.0, 400.0), (None, 410.0))),
        spent=Spent(seconds=30.5, bursts=21),
        fingerprint=HERE,
        tolerance=0.05,
        reused=Reused(tuned_at="2026-11-20T12:00:00+00:00", samples_per_s=790.0, speedup=1.9, rounds=2, seconds=30.5),
    )


def without_traces(result):
    return TuningResult.from_dict(result.to_dict())


def saved(result, folder):
    path = folder / "loader.json"
    result.save(path)
    return path


def written(folder, **changes):
    """A small valid file with some keys changed; None leaves a key out."""
    values = {"schema_version": "1.0", "status": "complete", "dataloader_kwargs": {"num_workers": 2}, **changes}
    path = folder / "loader.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


# Saving and loading


UNBOUNDED = interval(100.0, low=-math.inf, high=math.inf, count=1)


def with_failure(message):
    result = finished_run()
    failed = replace(result.trials[2], failure=replace(result.trials[2].failure, message=message))
    return replace(result, trials=(*result.trials[:2], failed))


def with_unbounded_intervals():
    # of which nothing is known beyond the value
    result = with_failure("plain")
    wide = replace(result.trials[0].measurement, samples_per_s=UNBOUNDED)
    trials = (replace(result.trials[0], measurement=wide), *result.trials[1:])
    return replace(
        result, trials=trials, measured=Measured(samples_per_s=UNBOUNDED, speedup=interval(2.0, high=math.inf))
    )


@pytest.mark.parametrize(
    "result",
    [with_failure("plain"), with_unbounded_intervals(), simulated_result(SimulatedMachine(noise_sd=0.03))],
    ids=["whole", "unbounded", "simulated"],
)
def test_what_is_saved_comes_back_without_traces(tmp_path, result):
    # WHEN a result is saved and loaded
    path = saved(result, tmp_path)
    loaded = TuningResult.load(path)
    # THEN all but the traces is the same, and the file is strict JSON that fits the schema
    assert loaded == without_traces(result)
    assert all(trial.measurement.traces == () for trial in loaded.trials if trial.measurement)
    strict = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(constant))
    jsonschema.validate(strict, json.loads(SCHEMA_FILE.read_text()))


def test_bytes_that_are_no_text_are_written_readably(tmp_path):
    loaded = TuningResult.load(saved(finished_run(), tmp_path))
    assert loaded.trials[2].failure.message == "cannot open 'bad-\\udcff.jpg'"


def test_a_tuned_batch_size_comes_back_in_the_config(tmp_path):
    best = replace(BEST, batch_size=64)
    result = replace(finished_run(), best=best, batch_size=BatchSizeChoice(value=64, tuned=True))
    assert TuningResult.load(saved(result, tmp_path)).best == best


def test_the_kwargs_in_the_file_splat_as_they_stand(tmp_path):
    kwargs = json.loads(saved(finished_run(), tmp_path).read_text())["dataloader_kwargs"]
    assert DataLoader([1, 2, 3], **kwargs).num_workers == 3


def test_saving_leaves_no_other_file_and_makes_the_folder(tmp_path):
    path = saved(finished_run(), tmp_path / "new" / "folder")
    assert list(path.parent.iterdir()) == [path]


def test_a_crash_while_writing_keeps_the_old_file(tmp_path):
    # GIVEN a saved file
    path = saved(finished_run(), tmp_path)
    before = path.read_bytes()
    # WHEN the next save dies between writing and renaming
    with mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        replace(finished_run(), summary=("Something else.",)).save(path)
    # THEN the old file is whole, and nothing else is left
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_the_file_as_the_umask_says(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    run = finished_run()
    run = replace(run, trials=tuple(trial for trial in run.trials if trial.failure is None))
    assert stat.S_IMODE(saved(run, tmp_path).stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_file_with_a_traceback_is_private(tmp_path):
    run = finished_run()
    assert any(trial.failure is not None and trial.failure.traceback for trial in run.trials)
    assert stat.S_IMODE(saved(run, tmp_path).stat().st_mode) == 0o600


# Reading what is not as it should be


def test_a_file_of_the_first_release_loads():
    loaded = TuningResult.load(OLD_FILE)
    assert loaded.best == BEST
    assert loaded.speedup.value == 2.0
    assert [trial.role for trial in loaded.trials] == ["baseline", "search", "search"]


def test_unknown_keys_are_ignored_at_every_depth(tmp_path):
    path = written(
        tmp_path,
        from_the_future={"a": 1},
        dataloader_kwargs={"num_workers": 2, "from_the_future": 1},
        measured={"from_the_future": 1, "wait_share": 0.5},
        extras={"from_the_future": True},
    )
    assert load_config(path) == LoaderConfig(num_workers=2)
    assert TuningResult.load(path).measured.wait_share == 0.5


def test_the_least_file_is_enough(tmp_path):
    result = TuningResult.load(written(tmp_path))
    assert (result.verdict.binding, result.tolerance, result.reused) == ("unknown", None, None)


@pytest.mark.parametrize("version", ["2.0", "2.7", "1.2"])
def test_the_same_and_older_major_versions_load(tmp_path, version):
    assert load_config(written(tmp_path, schema_version=version)).num_workers == 2


def test_a_newer_major_version_is_refused_with_the_way_out(tmp_path):
    path = written(tmp_path, schema_version="3.0")
    with pytest.raises(ConfigFileError) as caught:
        load_config(path)
    for part in (str(path), "schema_version='3.0'", "'2.0'", "pip install -U autotune-loader"):
        assert part in str(caught.value)


@pytest.mark.parametrize("version", [None, 1, "", "one", "-1.0", [], "9" * 5000])
def test_a_version_that_is_none_is_refused(tmp_path, version):
    path = written(tmp_path, schema_version=version)
    with pytest.raises(ConfigFileError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


CORRUPT = {
    "nothing": b"",
    "no JSON": b"num_workers: 4",
    "cut off": b'{"schema_version": "1.0", "status": "comp',
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "NaN": b'{"schema_version": "1.0", "status": "complete", "dataloader_kwargs": {"num_workers": NaN}}',
    "too large a number": b'{"schema_version": "1.0", "status": "complete", "dataloader_kwargs": {"num_workers": 1e999}}',
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_file_is_named(tmp_path, content):
    path = tmp_path / "loader.json"
    path.write_bytes(content)
    with pytest.raises(ConfigFileError) as caught:
        load_config(path)
    assert f"path={str(path)!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"status": "done"}, "status"),
        ({"status": None}, "status"),
        ({"dataloader_kwargs": None}, "dataloader_kwargs"),
        ({"dataloader_kwargs": {"num_workers": -1}}, "num_workers=-1 is below 0; num_workers=1 would work"),
        ({"dataloader_kwargs": {"num_workers": "4"}}, "num_workers='4' is not an integer"),
        ({"dataloader_kwargs": {"prefetch_factor": 2}}, "prefetch_factor=2 needs worker processes"),
        ({"extras": {"consumer_threads": 0}}, "consumer_threads=0 is below 1"),
        ({"measured": {"wait_share": "much"}}, "wait_share"),
        (
            {"finals": {"configs": [{}, {"num_workers": 1}], "rounds": [[1.0]]}},
            "every round of the finals needs 2 rates",
        ),
        ({"trials": [{"number": 0, "config": {}, "role": "search"}]}, "exactly one of measurement and failure"),
    ],
)
def test_a_wrong_value_is_named_with_a_way_out(tmp_path, changes, named):
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigFileError) as caught:
        TuningResult.load(path)
    for part in (str(path), named, "result.save('loader.json')"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("missing.json", r"cannot be read .*output='loader\.json'"),
        (".", "cannot be read"),
        ("a\0.json", "cannot be read"),
    ],
    ids=["missing", "a folder", "a null byte"],
)
def test_what_is_no_file_is_answered_with_how_to_make_one(tmp_path, name, told):
    with pytest.raises(ConfigFileError, match=told):
        load_config(tmp_path / name)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "loader.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with (
        mock.patch.object(Path, "read_bytes", side_effect=AssertionError),
        pytest.raises(ConfigFileError, match="bytes"),
    ):
        load_config(path)


# The machine


class FakeMachine:
    def __init__(self, fingerprint):
        self._fingerprint = fingerprint
        self.usable_cores = fingerprint.usable_cores

    def fingerprint(self, *, dataset):
        return replace(self._fingerprint, dataset=dataset)


@pytest.fixture
def on_machine(monkeypatch):
    def set_machine(fingerprint):
        monkeypatch.setattr("autotune_loader.machine.facts.inspect_machine", lambda: FakeMachine(fingerprint))

    return set_machine


EIGHT = replace(HERE, usable_cores=8, gpus=("A100",))
ALL = LoaderConfig(num_workers=8, prefetch_factor=4, pin_memory=True, device_prefetch=2, consumer_threads=4)


@pytest.mark.parametrize(
    ("here", "on_mismatch", "told", "changes"),
    [
        (EIGHT, "raise", None, {}),
        (replace(EIGHT, usable_cores=64), "raise", None, {}),
        (replace(EIGHT, usable_cores=9), "warn", None, {}),
        (
            replace(EIGHT, usable_cores=2),
            "warn",
            r"usable cores: 8 then, 2 here.*; clamped to 2 workers",
            {"num_workers": 2, "consumer_threads": 2},
        ),
        (replace(EIGHT, gpus=()), "warn", "A100 then, none here; the step takes another time$", {}),
        (
            replace(EIGHT, gpus=()),
            "clamp",
            "none here.*; clamped to 8 workers",
            {"pin_memory": False, "device_prefetch": 0},
        ),
        (replace(EIGHT, usable_cores=2), "raise", r"8 then, 2 here.*on_mismatch='clamp'", None),
    ],
    ids=["the same", "more cores", "one more", "fewer cores", "no GPU", "no GPU, clamped", "refused"],
)
def test_another_machine_is_told_of_with_both_values_and_what_was_changed(
    tmp_path, on_machine, here, on_mismatch, told, changes
):
    path = saved(replace(finished_run(), best=ALL, fingerprint=EIGHT), tmp_path)
    on_machine(here)
    if changes is None:
        with pytest.raises(MachineMismatchError, match=told):
            load_config(path, on_mismatch=on_mismatch)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load_config(path, on_mismatch=on_mismatch) == replace(ALL, **changes)
    assert len(caught) == (told is not None)
    for warning in caught:
        assert re.search(told, str(warning.message))
        assert str(path) in str(warning.message)
        assert warning.filename == __file__


def test_this_very_machine_loads_in_silence(tmp_path):
    here = inspect_machine().fingerprint(dataset="my dataset")
    assert load_config(saved(replace(finished_run(), fingerprint=here), tmp_path), on_mismatch="raise") == BEST


def test_a_mistyped_on_mismatch_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_mismatch='wran'"):
        load_config(tmp_path / "loader.json", on_mismatch="wran")


@given(st.integers(0, 64), st.integers(1, 64), st.integers(1, 64), st.none() | st.integers(1, 64), st.booleans())
def test_clamping_never_scales_up_and_always_stays_legal(workers, cores_then, cores_here, threads, has_gpu):
    config = LoaderConfig(num_workers=workers, consumer_threads=threads, pin_memory=True, device_prefetch=2)
    then = Fingerprint(usable_cores=cores_then, gpus=("A100",))
    clamped = clamp(config, then, Fingerprint(usable_cores=cores_here, gpus=("A100",) if has_gpu else ()))
    assert clamped.num_workers <= workers
    assert (clamped.num_workers == 0) == (workers == 0)
    assert (clamped.consumer_threads or 0) <= (threads or 0)
    if cores_here < cores_then:
        assert clamped.num_workers >= min(workers, cores_here)
        assert (clamped.consumer_threads or 0) <= cores_here
    assert (clamped.pin_memory, clamped.device_prefetch) == ((True, 2) if has_gpu else (False, 0))


# The schema


def test_the_schema_in_docs_is_the_one_of_the_code():
    assert json.loads(SCHEMA_FILE.read_text()) == json.loads(json.dumps(loader_schema())), (
        "write it again with: python -m tests.support.schema > docs/loader.schema.json"
    )


def test_the_schema_is_one_and_refuses_what_loading_refuses(tmp_path):
    jsonschema.Draft202012Validator.check_schema(loader_schema())
    jsonschema.validate(json.loads(OLD_FILE.read_text()), loader_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(written(tmp_path, status="done").read_text()), loader_schema())


# Loaders


def dataset():
    return TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, {"batch_size": 32, "num_workers": 3, "prefetch_factor": 4, "persistent_workers": True}),
        ({"batch_size": 5, "num_workers": 1}, {"batch_size": 5, "num_workers": 1, "prefetch_factor": 4}),
        ({"num_workers": 0}, {"num_workers": 0, "persistent_workers": False}),
        ({"batch_sampler": [[0, 1], [2, 3, 4]]}, {"batch_sampler": [[0, 1], [2, 3, 4]]}),
    ],
    ids=["as tuned", "other numbers", "no workers", "a batch_sampler"],
)
def test_a_loader_has_the_best_configuration_and_arguments_of_the_caller_win(arguments, shown):
    loader = finished_run().make_loader(dataset(), **arguments)
    assert {name: getattr(loader, name) for name in shown} == shown


def test_a_loader_takes_over_the_parts_of_the_tuned_one():
    result = replace(finished_run(), best=LoaderConfig(), parts={"collate_fn": len})
    assert list(result.make_loader(dataset(), batch_size=4)) == [4, 4, 2]


@pytest.mark.parametrize(
    ("order", "batches"),
    [({"sampler": SubsetRandomSampler([3])}, [[3]]), ({"batch_sampler": [[1, 2], [4, 5, 6]]}, [[1, 2], [4, 5, 6]])],
)
def test_a_sampler_of_the_users_own_is_kept_over_its_dataset_and_asked_for_over_another(order, batches):
    # GIVEN a loader with an order of its own
    data, (name,) = dataset(), order
    workload, _ = make_workload(DataLoader(data, **{"batch_size": 1, **order} if name == "sampler" else order))
    size = BatchSizeChoice(value=workload.data.batch_size)
    result = replace(finished_run(), best=LoaderConfig(), parts=loader_parts(workload), batch_size=size)
    # WHEN a loader is made over the same dataset THEN it has that order
    assert [batch[0].tolist() for batch in result.make_loader(data)] == batches
    # WHEN over another THEN it is asked for, and used
    with pytest.raises(ValueError, match=rf"{name} was not given, .*{name}=... for this dataset would work"):
        result.make_loader(dataset())
    assert [batch[0].tolist() for batch in result.make_loader(dataset(), **order)] == batches


def test_a_plain_order_is_the_callers_to_choose():
    workload, _ = make_workload(DataLoader(dataset(), shuffle=True))
    assert loader_parts(workload).keys() == {"collate_fn"}


def test_a_loader_made_for_a_device_without_tuned_prefetch_is_the_plain_one():
    result = TuningResult(best=LoaderConfig(), status="complete", baseline=LoaderConfig())
    assert type(result.make_loader([1, 2], batch_size=1, device="cuda")) is DataLoader


def test_a_result_prints_as_words_in_a_line_and_its_parts_do_too() -> None:
    assert str(finished_run()) == "Use 3 workers."
    assert str(replace(finished_run(), summary=())) == f"complete: {BEST}"
    result = simulated_result(SimulatedMachine(noise_sd=0.03))
    assert repr(result).startswith(f"<TuningResult complete: {result.best}; ")
    assert "\n" not in repr(result)
    assert " times the rate of " in repr(result)
    assert " times the rate of " not in repr(replace(result, best=result.baseline))  # of itself
    assert str(result.verdict) == result.verdict.sentence
    assert str(result.predict(num_workers=2, prefetch_factor=2)).startswith("2 workers, prefetch 2: ")
    assert str(Advice(action="Do less.", reason="it is much", expected_gain=0.5)) == "Do less (about +50 %): it is much"


def test_predictions_refuse_what_makes_no_sense_and_suggest_what_does() -> None:
    result = simulated_result(SimulatedMachine(noise_sd=0.03))
    with pytest.raises(ValueError, match="cores=0 must be more than 0"):
        result.predict(cores=0)
    with pytest.raises(TypeError, match="num_worker=2 is no knob; num_workers would work"):
        result.predict(num_worker=2)
