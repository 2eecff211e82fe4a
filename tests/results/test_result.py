"""`TuningResult` and `loader.json`: what is saved comes back, and a file that is not right says what is wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jsonschema
import pytest
import torch
from report.example import synthetic_result
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.results.load import MAX_FILE_BYTES, load_config
from autotune_loader.results.loader_file import BatchSizeChoice, Measured, Reused
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.assemble import loader_parts
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError, MachineMismatchError
from autotune_loader.values.measurement import Failure
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from tests.support.schema import loader_schema

OLD_FILE = Path(__file__).parent / "data" / "loader-1.0.json"
SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "loader.schema.json"
SCHEMA = jsonschema.Draft202012Validator(loader_schema())

BEST = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True, consumer_threads=1)
HERE = Fingerprint(usable_cores=4, memory_bytes=8 << 30, torch="2.13.0")


def finished_run(**changes):
    """A result with every field filled, as after a whole run."""
    failure = Failure(kind="crashed", phase="step", message="cannot open 'bad-\udcff.jpg'", traceback="Traceback ...")
    failed = Trial(number=2, config=LoaderConfig(num_workers=8), role="search", failure=failure)
    values = {
        "best": BEST,
        "trials": (*synthetic_result().trials[:2], failed),
        "batch_size": BatchSizeChoice(value=32),
        "summary": ("Use 3 workers.",),
        "fingerprint": HERE,
        "reused": Reused(
            tuned_at="2026-11-20T12:00:00+00:00", samples_per_s=790.0, speedup=1.9, rounds=2, seconds=30.5
        ),
        **changes,
    }
    return replace(synthetic_result(), **values)


def saved(result, folder):
    path = folder / "loader.json"
    result.save(path)
    return path


LEAST = {"schema_version": "2.0", "status": "complete", "dataloader_kwargs": {"num_workers": 2}}


def written(folder, content):
    """A file with these bytes, or a small valid one with some keys changed."""
    path = folder / "loader.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps({**LEAST, **content}).encode())
    return path


UNBOUNDED = Interval(value=100.0, low=-math.inf, high=math.inf, count=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"measured": Measured(samples_per_s=UNBOUNDED, speedup=UNBOUNDED)},
        {"best": replace(BEST, batch_size=64), "batch_size": BatchSizeChoice(value=64, tuned=True)},
    ],
    ids=["a run", "intervals without bounds", "a tuned batch size"],
)
def test_what_is_saved_comes_back_without_traces(tmp_path, changes):
    result = finished_run(**changes)
    path = saved(result, tmp_path / "new" / "folder")
    # THEN all but the traces is the same, and the file is strict JSON that fits the schema
    loaded = TuningResult.load(path)
    assert (loaded, loaded.best) == (TuningResult.from_dict(result.to_dict()), result.best)
    strict = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(constant))
    SCHEMA.validate(strict)
    # AND the arguments splat as they stand, bytes that are no text are readable, and nothing else is left
    assert DataLoader([1, 2, 3], **strict["dataloader_kwargs"]).num_workers == 3
    assert loaded.trials[2].failure.message == "cannot open 'bad-\\udcff.jpg'"
    assert list(path.parent.iterdir()) == [path]


def test_a_crash_while_writing_keeps_the_old_file(tmp_path):
    path = saved(finished_run(), tmp_path)
    before = path.read_bytes()
    # WHEN the next save dies between writing and renaming
    with mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        finished_run(summary=("Something else.",)).save(path)
    # THEN the old file is whole, and nothing else is left
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_leads_to_the_file_and_a_pipe_stays_one(tmp_path):
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "there.json")
    os.mkfifo(pipe)
    finished_run().save(link)
    with pytest.raises(OSError, match="it is no file"):
        finished_run().save(pipe)
    assert (link.is_symlink(), (tmp_path / "there.json").is_file(), pipe.is_fifo()) == (True, True, True)


def test_a_file_with_a_traceback_is_private_and_others_are_as_the_umask_says(tmp_path):
    run, plain = finished_run(), tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(saved(run, tmp_path).stat().st_mode) == 0o600
    harmless = replace(run, trials=run.trials[:2])
    assert stat.S_IMODE(saved(harmless, tmp_path).stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_file_of_the_first_release_loads_and_fits_the_schema(tmp_path):
    loaded = TuningResult.load(OLD_FILE)
    assert (loaded.best, loaded.speedup.value) == (BEST, 2.0)
    assert [trial.role for trial in loaded.trials] == ["baseline", "search", "search"]
    SCHEMA.validate(json.loads(OLD_FILE.read_text()))


FROM_THE_FUTURE = {
    "schema_version": "2.7",
    "from_the_future": {"a": 1},
    "dataloader_kwargs": {"num_workers": 2, "from_the_future": 1},
    "measured": {"from_the_future": 1, "wait_share": 0.5},
    "extras": {"from_the_future": True},
}


def test_the_least_file_is_enough_and_keys_that_are_not_known_are_ignored_at_every_depth(tmp_path):
    result = TuningResult.load(written(tmp_path, {}))
    assert (result.best.num_workers, result.verdict.binding, result.reused) == (2, "unknown", None)
    path = written(tmp_path, FROM_THE_FUTURE)
    assert load_config(path) == LoaderConfig(num_workers=2)
    assert TuningResult.load(path).measured.wait_share == 0.5


REFUSED = [
    ({"schema_version": "3.0"}, "schema_version='3.0', newer .*pip install -U autotune-loader"),
    ({"schema_version": None}, "schema_version=None"),
    ({"schema_version": 1}, "schema_version=1,"),
    ({"schema_version": "one"}, "schema_version='one'"),
    ({"schema_version": "9" * 5000}, ""),
    (b'{"schema_version": "1.0", "status": "comp', ""),
    (bytes(range(256)), ""),
    ({"budget": {"seconds": math.nan, "bursts": 1}}, "NaN is no number in JSON"),
    ({"status": "done"}, "status"),
    ({"dataloader_kwargs": {"num_workers": -1}}, "num_workers=-1 is below 0; num_workers=1 would work"),
    ({"extras": {"consumer_threads": 0}}, "consumer_threads=0 is below 1"),
    ({"measured": {"wait_share": "much"}}, "wait_share"),
    ({"finals": {"configs": [{}, {"num_workers": 1}], "rounds": [[1.0]]}}, "round of the finals needs 2 rates"),
    ({"finals": {"configs": [{}], "rounds": [[0.0]]}}, "finals"),
    ({"trials": [{"number": 0, "config": {}, "role": "search"}]}, "exactly one of measurement and failure"),
]


@pytest.mark.parametrize(("content", "told"), REFUSED, ids=[str(content)[:60] for content, _ in REFUSED])
def test_what_is_wrong_is_named_with_a_way_out(tmp_path, content, told):
    path = written(tmp_path, content)
    with pytest.raises(ConfigFileError, match=f"^path='{re.escape(str(path))}' .*{told}") as caught:
        TuningResult.load(path)
    assert "schema_version=" in told or "result.save('loader.json')" in str(caught.value)


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


def places(value, path=()):
    """The path of every value inside a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, part in inner for each in places(part, (*path, key)))]


ODD = (None, True, -1, 0, 1e308, math.nan, "x", "\ud800", [], [[1]], {}, {"a": 1})


def test_a_file_with_an_odd_value_anywhere_is_refused_or_saved_again_by_the_schema(tmp_path):
    for number, place in enumerate(places(json.loads(OLD_FILE.read_text()))[1:]):
        holder = document = json.loads(OLD_FILE.read_text())
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = ODD[number % len(ODD)]
        path = tmp_path / "loader.json"
        path.write_text(json.dumps(document))
        with warnings.catch_warnings(), contextlib.suppress(ConfigFileError):
            warnings.simplefilter("ignore")
            assert isinstance(load_config(path), LoaderConfig)
            result = TuningResult.load(path)
            result.save(path)
            SCHEMA.validate(json.loads(path.read_text(), parse_constant=pytest.fail))
            result.report()


ALL = LoaderConfig(num_workers=8, prefetch_factor=4, pin_memory=True, device_prefetch=2, consumer_threads=4)
EIGHT = replace(HERE, usable_cores=8, gpus=("A100",))
MORE, FEWER, NO_GPU = replace(EIGHT, usable_cores=64), replace(EIGHT, usable_cores=2), replace(EIGHT, gpus=())


@pytest.mark.parametrize(
    ("here", "on_mismatch", "told", "changes"),
    [
        (EIGHT, "raise", None, {}),
        (MORE, "raise", None, {}),
        (FEWER, "warn", "usable cores: 8 then, 2 here.*; clamped to 2 workers", {"num_workers": 2, "consumer_threads": 2}),
        (FEWER, "raise", "8 then, 2 here.*on_mismatch='clamp'", None),
        (NO_GPU, "warn", "A100 then, none here; the step takes another time$", {}),
        (NO_GPU, "clamp", "none here.*; clamped to 8 workers", {"pin_memory": False, "device_prefetch": 0}),
    ],
)  # fmt: skip
def test_another_machine_is_told_of_with_both_values_and_what_was_changed(
    tmp_path, monkeypatch, here, on_mismatch, told, changes
):
    path = saved(finished_run(best=ALL, fingerprint=EIGHT), tmp_path)
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


def test_the_variable_comes_before_the_directory_and_the_user(tmp_path, monkeypatch):
    # GIVEN a file in each place
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("AUTOTUNE_LOADER_CONFIG", "named.json")
    named, here, users = (
        Path("named.json"),
        Path("loader.json"),
        tmp_path / "config" / "autotune-loader" / "loader.json",
    )
    for workers, path in enumerate((named, here, users)):
        TuningResult(best=LoaderConfig(num_workers=workers), status="complete").save(path)
    # WHEN one after the other is taken away THEN the next is found
    assert load_config().num_workers == 0
    named.unlink()
    with pytest.raises(ConfigFileError, match=r"AUTOTUNE_LOADER_CONFIG='named\.json' names no file"):
        load_config()
    monkeypatch.delenv("AUTOTUNE_LOADER_CONFIG")
    assert load_config().num_workers == 1
    here.unlink()
    assert load_config().num_workers == 2
    users.unlink()
    # AND at last an error names every place
    with pytest.raises(ConfigFileError, match=f"AUTOTUNE_LOADER_CONFIG .*{re.escape(f'{here.absolute()}, {users}')}"):
        load_config()


@pytest.mark.process
def test_reading_a_file_needs_the_standard_library_alone(tmp_path):
    # GIVEN a machine without torch and without what tuning needs
    path = written(tmp_path, {})
    blocked = "torch numpy pandas msgspec optuna click rich psutil pynvml matplotlib platformdirs jinja2"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked.split()}))\n"
        f"from autotune_loader import load_config; print(load_config({str(path)!r}).to_kwargs()['num_workers'])"
    )
    # WHEN THEN a training job reads its configuration
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_the_schema_in_docs_is_the_one_of_the_code_and_refuses_what_loading_refuses():
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate({**LEAST, "status": "done"})
    assert json.loads(SCHEMA_FILE.read_text()) == json.loads(json.dumps(SCHEMA.schema)), (
        "write it again with: python -m tests.support.schema > docs/loader.schema.json"
    )


DATA = TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, {"batch_size": 32, "num_workers": 3, "prefetch_factor": 4, "persistent_workers": True, "collate_fn": len}),
        ({"batch_size": 5, "num_workers": 1}, {"batch_size": 5, "num_workers": 1, "prefetch_factor": 4}),
        ({"batch_sampler": [[0, 1], [2, 3, 4]]}, {"batch_sampler": [[0, 1], [2, 3, 4]]}),
        ({"device": "cuda"}, {"num_workers": 3}),  # no DevicePrefetcher, as none was tuned
    ],
    ids=["as tuned", "other numbers", "a batch_sampler", "for a device"],
)
def test_a_loader_has_what_was_tuned_and_the_parts_of_the_users_own_and_arguments_win(arguments, shown):
    loader = finished_run(parts={"collate_fn": len}).make_loader(DATA, **arguments)
    assert type(loader) is DataLoader
    assert {name: getattr(loader, name) for name in shown} == shown


@pytest.mark.parametrize(
    ("order", "batches"),
    [({"sampler": SubsetRandomSampler([3])}, [[3]]), ({"batch_sampler": [[1, 2], [4, 5, 6]]}, [[1, 2], [4, 5, 6]])],
)
def test_a_sampler_of_the_users_own_is_kept_over_its_dataset_and_asked_for_over_another(order, batches):
    (name,) = order
    workload = make_workload(DataLoader(DATA, **{"batch_size": 1, **order} if name == "sampler" else order))
    size = BatchSizeChoice(value=workload.data.batch_size)
    result = finished_run(best=LoaderConfig(), parts=loader_parts(workload), batch_size=size)
    # WHEN a loader is made over the same dataset THEN it has that order
    assert [batch[0].tolist() for batch in result.make_loader(DATA)] == batches
    # WHEN over another THEN it is asked for, and used
    other = TensorDataset(torch.arange(10))
    with pytest.raises(ValueError, match=rf"{name} was not given, .*{name}=... for this dataset would work"):
        result.make_loader(other)
    assert [batch[0].tolist() for batch in result.make_loader(other, **order)] == batches


def test_a_result_prints_as_words_in_a_line():
    assert str(finished_run()) == "Use 3 workers."
    assert str(finished_run(summary=())) == f"complete: {BEST}"
    told = repr(synthetic_result())
    assert re.fullmatch("<TuningResult complete: .* times the rate of 0 workers>", told)
