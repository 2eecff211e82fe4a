"""`TuningResult` and `loader.json`: what is saved comes back, and a file that is not right says what is wrong."""

from __future__ import annotations

import json
import math
import pickle
import re
import stat
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from report.example import synthetic_result
from torch.utils.data import DataLoader

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.result import TuningResult
from autotune_loader.results.file import load_config
from autotune_loader.results.record import Finding
from autotune_loader.values import (
    ConfigFileError,
    Failure,
    Interval,
    LoaderConfig,
    MachineMismatchError,
    Trial,
)

BEST = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True)
HERE = Fingerprint(usable_cores=4, memory_bytes=8 << 30, torch="2.13.0")


def finished_run(**changes):
    """A result with every field filled, as after a whole run."""
    failure = Failure(
        kind="crashed",
        phase="step",
        message="cannot open 'bad-\udcff.jpg'",
        traceback="Traceback ...",
    )
    failed = Trial(number=2, config=LoaderConfig(num_workers=8), failure=failure)
    trials, sites = (*synthetic_result().trials[:2], failed), {"train.py:50": {"num_workers": 1}}
    return replace(
        synthetic_result(),
        **{"best": BEST, "trials": trials, "machine": HERE, "loaders": sites, **changes},
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loader.json"


def write(path, **changes):
    """The least file there can be, with some keys changed."""
    least = {"schema_version": 1, "status": "complete", "dataloader_kwargs": {"num_workers": 2}}
    path.write_text(json.dumps({**least, **changes}))


RARE = {
    "best": replace(BEST, batch_size=64, device_prefetch=2), "batch_size": 64, "machine": replace(HERE, gpu=None),
    "rate": Interval(value=100.0, low=-math.inf, high=math.inf, count=1), "as_fast": (LoaderConfig(), BEST),
    "baseline": replace(BEST, in_order=False, multiprocessing_context="spawn"),
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, RARE], ids=["a run", "what is rare"])
def test_what_is_saved_comes_back_without_single_batches(tmp_path, changes):
    result, path = finished_run(**changes), tmp_path / "new" / "folder" / "loader.json"
    result.save(path)
    # THEN all but the batches is the same, and the file is strict JSON
    loaded = TuningResult.load(path)
    not_told = {"samples": 0, "window_s": 0.0, "read_bytes": None}
    for trial, its in zip(loaded.trials[:2], result.trials[:2], strict=True):
        assert trial == replace(its, measurement=replace(its.measurement, **not_told))
    assert replace(loaded, trials=result.trials) == result
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    # AND the arguments splat as they stand, bytes that are no text are readable, and nothing else is left
    assert DataLoader([1, 2, 3], **strict["dataloader_kwargs"]).num_workers == 3
    assert loaded.trials[2].failure.message == "cannot open 'bad-\\udcff.jpg'"
    assert list(path.parent.iterdir()) == [path]


def test_a_finding_is_its_sentence_with_a_name_and_survives_pickle_and_file():
    found = Finding(kind="cpu", sentence="Bottleneck: CPU.", gain=0.5)
    result = finished_run(warnings=(found,), bottleneck=found)
    loaded = TuningResult.from_dict(json.loads(json.dumps(result.to_dict())))
    for again in (pickle.loads(pickle.dumps(found)), *loaded.warnings):
        assert (again, again.kind, again.sentence, again.gain) == (
            found,
            "cpu",
            "Bottleneck: CPU.",
            0.5,
        )
    # AND a result is its pickle, too
    assert pickle.loads(pickle.dumps(loaded)) == loaded
    assert loaded.summary == result.summary
    assert result.summary.count("Bottleneck: CPU.") == 2


def test_a_file_holds_nothing_that_has_its_default():
    plain = synthetic_result().to_dict()
    assert next(iter(plain)) == "schema_version"
    assert plain["baseline"] == plain["trials"][0]["config"] == {"num_workers": 0}
    assert "failure" not in plain["trials"][0]
    assert plain["tuned_at"].startswith("20")


def test_a_crash_while_writing_keeps_the_old_file_whole_and_leaves_nothing_else(path):
    finished_run().save(path)
    before = path.read_bytes()
    with (
        mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        finished_run(step="something else").save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_a_traceback_is_private_and_others_are_as_the_umask_says(path):
    run, plain = finished_run(), path.with_name("plain")
    plain.touch()
    for result, mode in (
        (run, 0o600),
        (replace(run, trials=run.trials[:2]), stat.S_IMODE(plain.stat().st_mode)),
    ):
        result.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


FROM_THE_FUTURE = {
    "from_the_future": {"a": 1},
    "dataloader_kwargs": {"num_workers": 2, "collate_fn": "os:system"},
    "wait_share": 0.5,
    "bottleneck": {"kind": "cpu", "sentence": "Bottleneck: CPU.", "from_the_future": 1},
    "extras": {"from_the_future": True},
}


def test_the_least_file_is_enough_and_keys_that_are_not_known_are_ignored_at_every_depth(path):
    write(path)
    result = TuningResult.load(path)
    assert (result.best.num_workers, result.bottleneck, result.tolerance) == (2, None, 0.02)
    write(path, **FROM_THE_FUTURE)
    assert (load_config(path), TuningResult.load(path).wait_share) == (
        LoaderConfig(num_workers=2),
        0.5,
    )


REFUSED = [
    (
        {"schema_version": 2},
        "schema_version=2, newer than 1.*a newer release of autotune_loader would read it",
    ),
    ({"schema_version": None}, "schema_version=None"),
    (b'{"schema_version": 1, "status": "comp', ""),
    (bytes(range(256)), ""),
    (b"[" * 100_000, ""),
    ({"seconds": math.nan}, "NaN is not a number in JSON"),
    (
        {"dataloader_kwargs": {"num_workers": -1}},
        "num_workers=-1 must be an integer >= 0; num_workers=1 would work",
    ),
    (
        {"dataloader_kwargs": {"num_workers": 10**9}},
        "=1000000000 is larger than the maximum of 1024; num_workers=2",
    ),
    (
        {"dataloader_kwargs": {"num_workers": 1, "multiprocessing_context": "os.system"}},
        "'os.system'",
    ),
    ({"wait_share": "much"}, "wait_share"),
    ({"bottleneck": "CPU"}, "'CPU' is not a finding with a kind and a sentence"),
    ({"bottleneck": {"kind": "cpu", "sentence": "CPU.", "gain": "x"}}, "gain='x' is not a number"),
    (
        {"trials": [{"number": 0, "config": {}, "role": "search"}]},
        "exactly one of measurement and failure",
    ),
]


@pytest.mark.parametrize(
    ("content", "told"), REFUSED, ids=[str(content)[:60] for content, _ in REFUSED]
)
def test_what_is_wrong_is_named_with_a_way_out(path, content, told):
    path.write_bytes(content) if isinstance(content, bytes) else write(path, **content)
    with pytest.raises(ConfigFileError, match=f"^path='{re.escape(str(path))}' .*{told}") as caught:
        TuningResult.load(path)
    assert "newer release" in told or "result.save('loader.json')" in str(caught.value)
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["missing.json", ".", "a\0.json"], ids=["missing", "a folder", "a null byte"]
)
def test_what_is_no_file_is_answered_with_how_to_make_one(tmp_path, name):
    with pytest.raises(ConfigFileError, match=r"cannot be read .*output='loader\.json'"):
        load_config(tmp_path / name)


ALL = LoaderConfig(num_workers=8, prefetch_factor=4, pin_memory=True, device_prefetch=2)
EIGHT = replace(HERE, usable_cores=8, gpu="A100")
WITHOUT_GPU = {"pin_memory": False, "device_prefetch": 0}
MORE, FEWER = replace(EIGHT, usable_cores=64), replace(EIGHT, usable_cores=2)


@pytest.mark.parametrize(
    ("here", "on_mismatch", "told", "changes"),
    [
        (EIGHT, "strict", None, {}),
        (MORE, "strict", None, {}),
        (FEWER, "fit", "usable cores: 8 then, 2 here.*; changed to 2 workers", {"num_workers": 2}),
        (FEWER, "ignore", None, {}),
        (FEWER, "strict", "8 then, 2 here.*on_mismatch='fit'", None),
        (
            replace(EIGHT, gpu="T4"),
            "fit",
            "GPU: A100 then, T4 here; the step takes a different time",
            {},
        ),
        (replace(EIGHT, gpu="none"), "fit", "none here.*; changed to 8 workers", WITHOUT_GPU),
        (
            replace(FEWER, gpu=None),
            "fit",
            "8 then, 2 here.*; changed to 2 workers",
            {"num_workers": 2},
        ),
    ],
)
def test_another_machine_is_told_with_both_values_and_what_changed(
    path, monkeypatch, here, on_mismatch, told, changes
):
    finished_run(best=ALL, machine=EIGHT).save(path)
    machine = SimpleNamespace(fingerprint=lambda dataset: replace(here, dataset=dataset))
    monkeypatch.setattr("autotune_loader.results.file.inspect_machine", lambda: machine)
    if changes is None:
        with pytest.raises(MachineMismatchError, match=told):
            load_config(path, on_mismatch=on_mismatch)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load_config(path, on_mismatch=on_mismatch) == replace(ALL, **changes)
    assert [each.filename for each in caught] == ([] if told is None else [__file__])
    assert all(re.search(f"{re.escape(str(path))}.*{told}", str(each.message)) for each in caught)


def test_a_job_names_its_file_by_argument_by_variable_or_has_it_in_its_folder_and_nowhere_else(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("AUTOTUNE_LOADER_CONFIG", "named.json")
    for workers, name in enumerate(
        ("named.json", "loader.json", "config/autotune-loader/loader.json")
    ):
        TuningResult(best=LoaderConfig(num_workers=workers), status="complete").save(
            tmp_path / name
        )
    assert [load_config(*path).num_workers for path in (["loader.json"], [])] == [1, 0]
    Path("named.json").unlink()
    with pytest.raises(
        ConfigFileError, match=r"AUTOTUNE_LOADER_CONFIG='named\.json' is not a file"
    ):
        load_config()
    monkeypatch.delenv("AUTOTUNE_LOADER_CONFIG")
    assert load_config().num_workers == 1
    Path("loader.json").unlink()
    with pytest.raises(
        ConfigFileError, match=f"there is no {re.escape(str(tmp_path / 'loader.json'))}"
    ):
        load_config()


@pytest.mark.process
def test_reading_a_file_needs_the_standard_library_alone(path):
    write(path)
    blocked = "torch numpy pandas msgspec optuna click psutil matplotlib"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked.split()}))\n"
        f"from autotune_loader import load_config; print(load_config({str(path)!r}).to_kwargs()['num_workers'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_predictions_are_for_workers_prefetching_and_cores():
    result = synthetic_result()
    few, many = result.predict(num_workers=1), result.predict(num_workers=8, prefetch_factor=4)
    assert few.samples_per_s.value < many.samples_per_s.value
    assert (many.config.num_workers, many.config.prefetch_factor) == (8, 4)
    assert (
        result.predict(8, cores=1).samples_per_s.value
        < result.predict(8, cores=8).samples_per_s.value
    )
    assert result.predict().config == result.best
    loaded = TuningResult.from_dict(result.to_dict())
    assert loaded.predict(4).samples_per_s.value == pytest.approx(
        result.predict(4).samples_per_s.value, rel=0.2
    )
    with pytest.raises(ValueError, match="cores=0 must be greater than 0, such as cores=2"):
        result.predict(cores=0)
    with pytest.raises(
        ValueError, match=r"predict\(\) needs at least one successful trial; .* would work"
    ):
        TuningResult(best=LoaderConfig(), status="fallback").predict(2)
