"""`TuningResult` and `loader.json`: what is saved comes back, and a file that is not right says what is wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.results.load import MAX_FILE_BYTES, load_config
from autotune_loader.results.loader_file import (
    BatchSizeChoice,
    Measured,
    Reused,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.assemble import loader_parts
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError, MachineMismatchError
from autotune_loader.values.measurement import Failure
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from tests.support import SimulatedMachine, simulated_result
from tests.support.schema import loader_schema

REPOSITORY = Path(__file__).parents[2]
OLD_FILE = Path(__file__).parent / "data" / "loader-1.0.json"
SCHEMA_FILE = REPOSITORY / "docs" / "loader.schema.json"

BEST = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True, consumer_threads=1)
HERE = Fingerprint(usable_cores=4, memory_bytes=8 << 30, torch="2.13.0", start_method="fork")


@functools.cache
def finished_run():
    """A result with every field filled, as after a whole run."""
    run = simulated_result(SimulatedMachine(noise_sd=0.03))
    failure = Failure(kind="crashed", phase="step", message="cannot open 'bad-\udcff.jpg'", traceback="Traceback ...")
    failed = Trial(number=2, config=LoaderConfig(num_workers=8), role="search", failure=failure)
    return replace(
        run,
        best=BEST,
        trials=(*run.trials[:2], failed),
        batch_size=BatchSizeChoice(value=32),
        summary=("Use 3 workers.",),
        fingerprint=HERE,
        reused=Reused(tuned_at="2026-11-20T12:00:00+00:00", samples_per_s=790.0, speedup=1.9, rounds=2, seconds=30.5),
    )


def with_unbounded_intervals():
    """Of which nothing is known beyond the value."""
    unbounded, run = Interval(value=100.0, low=-math.inf, high=math.inf, count=1), finished_run()
    wide = replace(run.trials[0], measurement=replace(run.trials[0].measurement, samples_per_s=unbounded))
    return replace(run, trials=(wide,), measured=Measured(samples_per_s=unbounded, speedup=unbounded))


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


@pytest.mark.parametrize("make", [finished_run, with_unbounded_intervals])
def test_what_is_saved_comes_back_without_traces(tmp_path, make):
    path = saved(make(), tmp_path)
    # THEN all but the traces is the same, and the file is strict JSON that fits the schema
    assert TuningResult.load(path) == TuningResult.from_dict(make().to_dict())
    strict = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(constant))
    jsonschema.validate(strict, loader_schema())


def test_what_the_file_says_and_where_it_is(tmp_path):
    best = replace(BEST, batch_size=64)
    result = replace(finished_run(), best=best, batch_size=BatchSizeChoice(value=64, tuned=True))
    path = saved(result, tmp_path / "new" / "folder")
    assert list(path.parent.iterdir()) == [path]
    # THEN the arguments splat as they stand, a tuned batch size comes back, and bytes that are no text are readable
    assert DataLoader([1, 2, 3], **json.loads(path.read_text())["dataloader_kwargs"]).num_workers == 3
    loaded = TuningResult.load(path)
    assert loaded.best == best
    assert loaded.trials[2].failure.message == "cannot open 'bad-\\udcff.jpg'"


def test_a_crash_while_writing_keeps_the_old_file(tmp_path):
    path = saved(finished_run(), tmp_path)
    before = path.read_bytes()
    # WHEN the next save dies between writing and renaming
    with mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        replace(finished_run(), summary=("Something else.",)).save(path)
    # THEN the old file is whole, and nothing else is left
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_a_traceback_is_private_and_others_are_as_the_umask_says(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    run = finished_run()
    assert stat.S_IMODE(saved(run, tmp_path).stat().st_mode) == 0o600
    harmless = replace(run, trials=tuple(trial for trial in run.trials if trial.failure is None))
    assert stat.S_IMODE(saved(harmless, tmp_path).stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


# Reading what is not as it should be


def test_a_file_of_the_first_release_loads_and_fits_the_schema_which_refuses_what_loading_refuses(tmp_path):
    loaded = TuningResult.load(OLD_FILE)
    assert (loaded.best, loaded.speedup.value) == (BEST, 2.0)
    assert [trial.role for trial in loaded.trials] == ["baseline", "search", "search"]
    jsonschema.validate(json.loads(OLD_FILE.read_text()), loader_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(written(tmp_path, status="done").read_text()), loader_schema())


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


@pytest.mark.parametrize("version", ["2.7", "1.2"])
def test_the_same_and_older_major_versions_load_and_the_least_file_is_enough(tmp_path, version):
    result = TuningResult.load(written(tmp_path, schema_version=version))
    assert (result.best.num_workers, result.verdict.binding, result.reused) == (2, "unknown", None)


@pytest.mark.parametrize("version", ["3.0", None, 1, "one", "9" * 5000])
def test_a_newer_major_version_and_one_that_is_none_is_refused(tmp_path, version):
    path = written(tmp_path, schema_version=version)
    with pytest.raises(ConfigFileError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    if version == "3.0":
        assert "schema_version='3.0'" in str(caught.value)
        assert "pip install -U autotune-loader" in str(caught.value)


CORRUPT = {
    "nothing": b"",
    "cut off": b'{"schema_version": "1.0", "status": "comp',
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "NaN": b'{"schema_version": "1.0", "status": "complete", "dataloader_kwargs": {"num_workers": NaN}}',
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
        ({"dataloader_kwargs": {"num_workers": -1}}, "num_workers=-1 is below 0; num_workers=1 would work"),
        ({"extras": {"consumer_threads": 0}}, "consumer_threads=0 is below 1"),
        ({"measured": {"wait_share": "much"}}, "wait_share"),
        ({"finals": {"configs": [{}, {"num_workers": 1}], "rounds": [[1.0]]}}, "round of the finals needs 2 rates"),
        ({"finals": {"configs": [{}], "rounds": [[0.0]]}}, "finals"),
        ({"trials": [{"number": 0, "config": {}, "role": "search"}]}, "exactly one of measurement and failure"),
    ],
)
def test_a_wrong_value_is_named_with_a_way_out(tmp_path, changes, named):
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigFileError) as caught:
        TuningResult.load(path)
    for part in (str(path), named, "result.save('loader.json')"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0.json"], ids=["missing", "a folder", "a null byte"])
def test_what_is_no_file_is_answered_with_how_to_make_one(tmp_path, name):
    with pytest.raises(ConfigFileError, match=r"cannot be read .*output='loader\.json'"):
        load_config(tmp_path / name)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "loader.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    never = mock.patch.object(Path, "read_bytes", side_effect=AssertionError)
    with never, pytest.raises(ConfigFileError, match="bytes"):
        load_config(path)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
odd_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value, path=()):
    """The path of every value inside a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, part in inner for each in places(part, (*path, key)))]


# The same examples each time, and no search for a smaller one: a failure names its example at once.
@settings(
    max_examples=100,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(places(json.loads(OLD_FILE.read_text()))[1:]), odd_values)
def test_a_file_with_one_odd_value_is_refused_or_saved_again_by_the_schema(tmp_path, place, value):
    holder = document = json.loads(OLD_FILE.read_text())
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    path = tmp_path / "loader.json"
    path.write_text(json.dumps(document))
    with warnings.catch_warnings(), contextlib.suppress(ConfigFileError):
        warnings.simplefilter("ignore")
        assert isinstance(load_config(path), LoaderConfig)
        result = TuningResult.load(path)
        result.save(path)
        jsonschema.validate(json.loads(path.read_text(), parse_constant=pytest.fail), loader_schema())
        result.report()


# The machine


EIGHT = replace(HERE, usable_cores=8, gpus=("A100",))
ALL = LoaderConfig(num_workers=8, prefetch_factor=4, pin_memory=True, device_prefetch=2, consumer_threads=4)


@pytest.mark.parametrize(
    ("here", "on_mismatch", "told", "changes"),
    [
        (EIGHT, "raise", None, {}),
        (replace(EIGHT, usable_cores=64), "raise", None, {}),
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
    ids=["the same", "more cores", "fewer cores", "no GPU", "no GPU, clamped", "refused"],
)
def test_another_machine_is_told_of_with_both_values_and_what_was_changed(
    tmp_path, monkeypatch, here, on_mismatch, told, changes
):
    path = saved(replace(finished_run(), best=ALL, fingerprint=EIGHT), tmp_path)
    machine = SimpleNamespace(
        usable_cores=here.usable_cores, fingerprint=lambda dataset: replace(here, dataset=dataset)
    )
    monkeypatch.setattr("autotune_loader.machine.facts.inspect_machine", lambda: machine)
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


# The schema


def test_the_schema_in_docs_is_the_one_of_the_code():
    assert json.loads(SCHEMA_FILE.read_text()) == json.loads(json.dumps(loader_schema())), (
        "write it again with: python -m tests.support.schema > docs/loader.schema.json"
    )


# Loaders


def dataset():
    return TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, {"batch_size": 32, "num_workers": 3, "prefetch_factor": 4, "persistent_workers": True}),
        ({"batch_size": 5, "num_workers": 1}, {"batch_size": 5, "num_workers": 1, "prefetch_factor": 4}),
        ({"batch_sampler": [[0, 1], [2, 3, 4]]}, {"batch_sampler": [[0, 1], [2, 3, 4]]}),
    ],
    ids=["as tuned", "other numbers", "a batch_sampler"],
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


def test_a_loader_made_for_a_device_without_tuned_prefetch_is_the_plain_one():
    result = TuningResult(best=LoaderConfig(), status="complete", baseline=LoaderConfig())
    assert type(result.make_loader([1, 2], batch_size=1, device="cuda")) is DataLoader


def test_a_result_prints_as_words_in_a_line() -> None:
    assert str(finished_run()) == "Use 3 workers."
    assert str(replace(finished_run(), summary=())) == f"complete: {BEST}"
    told = repr(simulated_result(SimulatedMachine(noise_sd=0.03)))
    assert told.startswith("<TuningResult complete: ")
    assert " times the rate of " in told
    assert "\n" not in told
