"""`TuningResult` and `loader.json`: what is saved comes back, and a file that is not right says what is wrong."""

from __future__ import annotations

import copy
import json
import math
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.results.load import MAX_FILE_BYTES, clamp, load_config
from autotune_loader.results.loader_file import (
    Advice,
    BatchSizeChoice,
    Finals,
    Measured,
    Predicted,
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
from autotune_loader.values.serialization import to_plain
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
        measured=Measured(
            samples_per_s=interval(800.0), speedup=interval(2.0), wait_share=0.25, gpu_util_reason="none"
        ),
        predicted=Predicted(samples_per_s=interval(810.0), epoch_s=12.5),
        verdict=Verdict(binding="cpu", sentence="The CPU binds.", headroom=0.5),
        advice=(Advice(action="Do less.", reason="It is much.", expected_gain=0.5),),
        summary=("Use 3 workers.",),
        warnings=("The machine was busy.",),
        finals=Finals(configs=(BEST, LoaderConfig()), rounds=((800.0, 400.0), (None, 410.0))),
        spent=Spent(seconds=30.5, bursts=21),
        space_hash="0123456789abcdef",
        fingerprint=HERE,
        tolerance=0.05,
        reused=Reused(tuned_at="2026-11-20T12:00:00+00:00", samples_per_s=790.0, speedup=1.9, rounds=2, seconds=30.5),
    )


def without_traces(result):
    return TuningResult.from_file(result.to_file())


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


def test_what_is_saved_comes_back(tmp_path):
    # GIVEN a finished run whose failure's message holds no odd bytes
    result = finished_run()
    failed = replace(result.trials[2], failure=replace(result.trials[2].failure, message="plain"))
    result = replace(result, trials=(*result.trials[:2], failed))
    # WHEN it is saved and loaded
    loaded = TuningResult.load(saved(result, tmp_path))
    # THEN all but the traces is the same
    assert loaded == without_traces(result)
    assert loaded.best == BEST


def test_bytes_that_are_no_text_are_written_readably(tmp_path):
    loaded = TuningResult.load(saved(finished_run(), tmp_path))
    assert loaded.trials[2].failure.message == "cannot open 'bad-\\udcff.jpg'"


def test_an_unbounded_interval_comes_back(tmp_path):
    # GIVEN an interval of which nothing is known beyond its value
    unbounded = interval(800.0, low=-math.inf, high=math.inf, count=1)
    result = replace(finished_run(), measured=Measured(samples_per_s=unbounded, speedup=interval(2.0, high=math.inf)))
    # WHEN it goes through a file
    path = saved(result, tmp_path)
    # THEN the file is strict JSON that fits the schema, and nothing is lost
    strict = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(constant))
    jsonschema.validate(strict, loader_schema())
    assert TuningResult.load(path).measured == result.measured


def test_a_trial_with_an_unbounded_rate_comes_back(tmp_path):
    result = finished_run()
    wide = replace(result.trials[0].measurement, samples_per_s=interval(100.0, low=-math.inf, high=math.inf))
    result = replace(result, trials=(replace(result.trials[0], measurement=wide),))
    assert TuningResult.load(saved(result, tmp_path)) == without_traces(result)


def test_traces_are_not_written(tmp_path):
    loaded = TuningResult.load(saved(finished_run(), tmp_path))
    assert all(trial.measurement.traces == () for trial in loaded.trials if trial.measurement)


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
    assert TuningResult.load(written(tmp_path)).verdict.binding == "unknown"


@pytest.mark.parametrize("version", ["2.0", "2.7", "1.2"])
def test_the_same_and_older_major_versions_load(tmp_path, version):
    assert load_config(written(tmp_path, schema_version=version)).num_workers == 2


def test_a_newer_major_version_is_refused_with_the_way_out(tmp_path):
    path = written(tmp_path, schema_version="3.0")
    with pytest.raises(ConfigFileError) as caught:
        load_config(path)
    for part in (str(path), "schema_version='3.0'", "'2.0'", "pip install -U autotune-loader"):
        assert part in str(caught.value)


def test_a_file_of_before_the_tolerance_was_kept_tells_none(tmp_path):
    result = TuningResult.load(written(tmp_path))
    assert (result.tolerance, result.reused) == (None, None)


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


def test_a_missing_file_is_answered_with_how_to_make_one(tmp_path):
    with pytest.raises(ConfigFileError, match=r"missing\.json' cannot be read .*output='loader\.json'"):
        load_config(tmp_path / "missing.json")


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ConfigFileError, match="cannot be read"):
        load_config(tmp_path)


def test_a_name_with_a_null_byte_is_no_file():
    with pytest.raises(ConfigFileError, match="cannot be read"):
        load_config("loader\0.json")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "loader.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with (
        mock.patch.object(Path, "read_bytes", side_effect=AssertionError),
        pytest.raises(ConfigFileError, match="bytes"),
    ):
        load_config(path)


def base_values():
    """The values of a full file, as JSON has them."""
    result = finished_run()
    return to_plain(result.to_file())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value, path=()):
    """The path of every value in a JSON document."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


VALUES = base_values()
PLACES = [path for path in places(VALUES) if path]


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.none() | st.just("gone") | json_values), min_size=1, max_size=3))
@settings(max_examples=300)
def test_any_mutation_of_a_file_loads_or_is_refused_as_a_config_file(tmp_path_factory, mutations):
    # GIVEN a whole file in which a few values were replaced or removed
    values = copy.deepcopy(VALUES)
    for path, replacement in mutations:
        mutate(values, path, replacement)
    file = tmp_path_factory.getbasetemp() / "mutated.json"
    file.write_text(json.dumps(values))
    # THEN it loads, or it is a ConfigFileError
    assert isinstance(outcome_of_loading(file), (LoaderConfig, ConfigFileError))


@given(st.binary(max_size=60), st.integers(0, 4000), st.integers(0, 50))
@settings(max_examples=100)
def test_any_damage_to_the_bytes_loads_or_is_refused_as_a_config_file(tmp_path_factory, noise, start, length):
    data = json.dumps(VALUES).encode()
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_bytes(data[:start] + noise + data[start + length :])
    assert isinstance(outcome_of_loading(file), (LoaderConfig, ConfigFileError))


def mutate(values, path, replacement):
    *way, last = path
    for key in way:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(values, list) and last in range(len(values)):
        values[last] = replacement
    if isinstance(values, dict):
        values.pop(last, None)
        if replacement != "gone":
            values[last] = replacement


def outcome_of_loading(file):
    with (
        mock.patch("autotune_loader.machine.facts.inspect_machine", return_value=FakeMachine(HERE)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            TuningResult.load(file)
            return load_config(file, on_mismatch="clamp")
        except ConfigFileError as error:
            return error


# The machine


class FakeMachine:
    def __init__(self, fingerprint):
        self._fingerprint = fingerprint
        self.usable_cores = fingerprint.usable_cores

    def fingerprint(self, *, dataset, storage):
        return replace(self._fingerprint, dataset=dataset, storage=storage)


@pytest.fixture
def on_machine(monkeypatch):
    def set_machine(fingerprint):
        monkeypatch.setattr("autotune_loader.machine.facts.inspect_machine", lambda: FakeMachine(fingerprint))

    return set_machine


def test_the_same_machine_loads_in_silence(tmp_path, on_machine):
    on_machine(HERE)
    assert load_config(saved(finished_run(), tmp_path)) == BEST


def test_this_very_machine_loads_in_silence(tmp_path):
    from autotune_loader.machine.facts import inspect_machine

    here = inspect_machine().fingerprint(dataset="my dataset", storage="ext4")
    assert load_config(saved(replace(finished_run(), fingerprint=here), tmp_path), on_mismatch="raise") == BEST


def test_another_machine_is_warned_about_with_both_values(tmp_path, on_machine):
    on_machine(replace(HERE, usable_cores=3))
    path = saved(finished_run(), tmp_path)
    with pytest.warns(UserWarning, match="tuned on another machine: usable cores: 4 then, 3 here") as caught:
        assert load_config(path) == BEST
    assert str(path) in str(caught[0].message)
    assert caught[0].filename == __file__


def test_fewer_cores_than_workers_clamp_with_a_warning_and_nothing_else_does(tmp_path, on_machine):
    # GIVEN a configuration for eight cores and a GPU, with a worker for each core and four threads of the step
    eight = replace(HERE, usable_cores=8, gpus=("A100",))
    tuned = LoaderConfig(num_workers=8, prefetch_factor=4, pin_memory=True, consumer_threads=4)
    path = saved(replace(finished_run(), best=tuned, fingerprint=eight), tmp_path)

    # WHEN a container with two of the cores loads it
    on_machine(replace(eight, usable_cores=2))
    with pytest.warns(UserWarning, match=r"8 then, 2 here.*; clamped to 2 workers"):
        config = load_config(path)
    # THEN it gets as many workers and threads as it has cores
    assert config == replace(tuned, num_workers=2, consumer_threads=2)

    # WHEN a machine without the GPU loads it THEN it is warned, and the configuration stays as it was
    on_machine(replace(eight, gpus=()))
    with pytest.warns(UserWarning, match=r"A100 then, none here; the step takes another time$"):
        assert load_config(path) == tuned


def test_another_machine_can_be_refused(tmp_path, on_machine):
    on_machine(replace(HERE, usable_cores=2))
    with pytest.raises(MachineMismatchError, match=r"4 then, 2 here.*on_mismatch='clamp'"):
        load_config(saved(finished_run(), tmp_path), on_mismatch="raise")


def test_another_machine_can_be_clamped_to(tmp_path, on_machine):
    on_machine(replace(HERE, usable_cores=2))
    with pytest.warns(UserWarning, match="clamped to 2 workers"):
        config = load_config(saved(finished_run(), tmp_path), on_mismatch="clamp")
    assert config == replace(BEST, num_workers=2)


def test_a_machine_with_more_cores_is_no_reason_for_a_warning(tmp_path, on_machine):
    on_machine(replace(HERE, usable_cores=64))
    assert load_config(saved(finished_run(), tmp_path), on_mismatch="raise") == BEST


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


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(loader_schema())


@pytest.mark.parametrize(
    "result",
    [
        finished_run(),
        TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig()),
        replace(finished_run(), status="partial", finals=Finals()),
    ],
    ids=lambda result: result.status,
)
def test_every_saved_file_fits_the_schema(tmp_path, result):
    jsonschema.validate(json.loads(saved(result, tmp_path).read_text()), json.loads(SCHEMA_FILE.read_text()))


def test_the_old_file_fits_the_schema():
    jsonschema.validate(json.loads(OLD_FILE.read_text()), json.loads(SCHEMA_FILE.read_text()))


def test_the_schema_refuses_what_loading_refuses(tmp_path):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(written(tmp_path, status="done").read_text()), loader_schema())


# Loaders


def dataset():
    return TensorDataset(torch.arange(10))


def test_a_loader_has_the_best_config_and_the_tuned_batch_size():
    loader = replace(finished_run(), best=LoaderConfig()).make_loader(dataset(), shuffle=False)
    assert [len(batch[0]) for batch in loader] == [10]
    assert loader.batch_size == 32


def test_arguments_of_the_caller_win():
    loader = finished_run().make_loader(dataset(), batch_size=5, num_workers=1)
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (5, 1, 4)


def test_no_workers_can_be_asked_for():
    # GIVEN a best configuration with workers, persistent ones
    # WHEN the caller wants none, to debug for example
    loader = finished_run().make_loader(dataset(), num_workers=0)
    # THEN what needs workers is left out
    assert (loader.num_workers, loader.persistent_workers) == (0, False)


def test_a_batch_sampler_of_the_caller_is_used():
    batches = [[0, 1], [2, 3, 4]]
    result = replace(finished_run(), best=LoaderConfig(drop_last=True))
    assert [len(batch[0]) for batch in result.make_loader(dataset(), batch_sampler=batches)] == [2, 3]


def test_a_loader_takes_over_the_parts_of_the_tuned_one():
    def collate(samples):
        return len(samples)

    result = replace(finished_run(), best=LoaderConfig(), parts={"collate_fn": collate})
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


def test_a_result_prints_its_summary():
    assert str(finished_run()) == "Use 3 workers."
    assert str(replace(finished_run(), summary=())) == f"complete: {BEST}"


def test_a_result_prints_as_words_in_a_line_and_its_parts_do_too() -> None:
    result = simulated_result(SimulatedMachine(noise_sd=0.03))
    assert repr(result).startswith(f"<TuningResult complete: {result.best}; ")
    assert "\n" not in repr(result)
    assert " times the rate of " in repr(result)
    assert " times the rate of " not in repr(replace(result, best=result.baseline))  # of itself
    assert str(Interval(value=4.1, low=3.89, high=4.33, count=7)) == "4.10 (3.89 to 4.33)"
    assert str(Interval(value=1304.7, low=-math.inf, high=math.inf, count=1)) == "1,305"
    assert str(result.verdict) == result.verdict.sentence
    assert str(result.predict(num_workers=2, prefetch_factor=2)).startswith("2 workers, prefetch 2: ")
    assert str(Advice(action="Do less.", reason="it is much", expected_gain=0.5)) == "Do less (about +50 %): it is much"


def test_what_is_loaded_equals_what_was_saved(tmp_path: Path) -> None:
    # GIVEN the result of a search, histories of batches and all
    result = simulated_result(SimulatedMachine(noise_sd=0.03))
    assert any(trial.measurement and trial.measurement.traces for trial in result.trials)
    # WHEN it is saved and loaded, THEN it is the same
    result.save(tmp_path / "loader.json")
    assert TuningResult.load(tmp_path / "loader.json") == result


def test_predictions_refuse_what_makes_no_sense_and_suggest_what_does() -> None:
    result = simulated_result(SimulatedMachine(noise_sd=0.03))
    with pytest.raises(ValueError, match="cores=0 must be more than 0"):
        result.predict(cores=0)
    with pytest.raises(TypeError, match="num_worker=2 is no knob; num_workers would work"):
        result.predict(num_worker=2)
