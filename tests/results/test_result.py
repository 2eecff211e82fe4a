"""`TuningResult` and `loader.json`: what is saved comes back, a wrong file says what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pickle
import re
import stat
import subprocess
import sys
import types
import typing
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report.example import ran, synthetic_result
from torch.utils.data import DataLoader

from autotune_loader.machine.facts import Fingerprint, inspect_machine, visible_gpu
from autotune_loader.results.file import fit, load_config
from autotune_loader.results.result import Finding, TuningResult
from autotune_loader.values import (
    ConfigFileError,
    Failure,
    Interval,
    LoaderConfig,
    MachineMismatchError,
    Measurement,
    Trial,
)
from autotune_loader.values.serialization import from_plain, to_plain

BEST = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True)
HERE = Fingerprint(usable_cores=4, memory_bytes=8 << 30, torch="2.13.0")
BAD_FILE = {"kind": "crashed", "phase": "step", "message": "cannot open 'bad-\udcff.jpg'"}
FAILED = Trial(
    number=2,
    config=LoaderConfig(num_workers=8),
    failure=Failure(**BAD_FILE, traceback="Traceback ..."),
)


def finished_run(**changes):
    """A result with every field filled, as after a whole run."""
    trials, sites = (*synthetic_result().trials[:2], FAILED), {"train.py:50": {"num_workers": 1}}
    filled = {"best": BEST, "trials": trials, "machine": HERE, "loaders": sites}
    return replace(synthetic_result(), **{**filled, **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loader.json"


def write(path, **changes):
    """The least file there can be, with some keys changed."""
    least = {"schema_version": 1, "status": "complete", "dataloader_kwargs": {"num_workers": 2}}
    path.write_text(json.dumps({**least, **changes}))


RARE = {
    "best": replace(BEST, batch_size=64, device_prefetch=2),
    "batch_size": 64,
    "machine": replace(HERE, gpu=None),
    "rate": Interval(value=100.0, low=-math.inf, high=math.inf, count=1),
    "as_fast": (LoaderConfig(), BEST),
    "baseline": replace(BEST, in_order=False, multiprocessing_context="spawn"),
}


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
    # AND the arguments splat, bytes that are no text are readable, and nothing else is left
    assert DataLoader([1, 2, 3], **strict["dataloader_kwargs"]).num_workers == 3
    assert loaded.trials[2].failure.message == "cannot open 'bad-\\udcff.jpg'"
    assert list(path.parent.iterdir()) == [path]
    # AND a result is its pickle, too
    assert pickle.loads(pickle.dumps(loaded)) == loaded
    assert loaded.summary == result.summary


FLOATS, TEXTS = st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=9)
VALUES = {
    int: st.integers(0, 1 << 60), float: FLOATS, str: TEXTS, bool: st.booleans(),
    LoaderConfig: st.sampled_from([LoaderConfig(), BEST, RARE["best"], RARE["baseline"]]),
    Finding: st.builds(Finding, kind=TEXTS, sentence=TEXTS, gain=st.none() | FLOATS),
    Interval: st.builds(
        Interval, value=FLOATS, low=FLOATS | st.just(-math.inf), high=FLOATS | st.just(math.inf),
        count=st.integers(0, 9),
    ),
}  # fmt: skip


def any_of(kind):
    """Values of a type as records name them."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in VALUES:
        return VALUES[kind]
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if each is type(None) else any_of(each) for each in inner))
    if origin is tuple:
        return st.lists(any_of(inner[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(*map(any_of, inner), max_size=2)
    if kind is Trial:
        measured = any_fields(kind, measurement=any_of(Measurement), failure=st.none())
        return measured | any_fields(kind, measurement=st.none(), failure=any_of(Failure))
    return any_fields(kind)


def told_types(kind):
    """The types of a record's fields by name; what is not compared is not in a file."""
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind) if each.compare}


def any_fields(kind, **given):
    values = {name: any_of(its) for name, its in told_types(kind).items() if name not in given}
    return st.builds(kind, **values, **given)


def records_in(kind):
    """Each record that a type holds."""
    is_record = dataclasses.is_dataclass(kind)
    yield from [kind] if is_record else []
    inner = told_types(kind).values() if is_record else typing.get_args(kind)
    for each in inner:
        yield from records_in(each)


RECORDS = {*records_in(TuningResult)}.difference([TuningResult])


@pytest.mark.parametrize("kind", sorted(RECORDS, key=lambda kind: kind.__name__))
@settings(max_examples=30)
@given(data=st.data())
def test_every_record_comes_back_from_plain_values(kind, data):
    record = data.draw(any_of(kind))
    again = from_plain(json.loads(json.dumps(to_plain(record), allow_nan=False)), kind)
    assert again == record
    assert to_plain(again) == to_plain(record)


def test_a_file_holds_nothing_that_has_its_default():
    plain = synthetic_result().to_dict()
    assert next(iter(plain)) == "schema_version"
    assert plain["baseline"] == plain["trials"][0]["config"] == {"num_workers": 0}
    assert "failure" not in plain["trials"][0]
    assert plain["tuned_at"].startswith("20")


def test_rounds_tell_more_than_trials_alone():
    alone = (ran(BEST, 1.0), ran(BEST, 2.0, 1))
    trials = (*alone, *(ran(BEST, 3.0 + n, 2 + n, n) for n in range(2)), FAILED)
    result = finished_run(trials=(*trials, ran(LoaderConfig(), 9.0, 4, 1)))
    assert result.rates_of(BEST) == {0: 3.0, 1: 4.0}
    assert result.measurement_of(BEST).samples_per_s.value == 3.5
    assert result.measurement_of(LoaderConfig()).samples_per_s.value == 9.0
    assert result.measurement_of(FAILED.config) is None
    # AND without rounds it is the last, whether workers are kept or not
    result = finished_run(trials=alone)
    assert result.measurement_of(replace(BEST, persistent_workers=False)) == alone[1].measurement


def test_a_crash_while_writing_keeps_the_old_file(path):
    finished_run().save(path)
    before = path.read_bytes()
    crash = mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt)
    with crash, pytest.raises(KeyboardInterrupt):
        finished_run(step="something else").save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_with_a_traceback_is_private(path):
    plain = path.with_name("plain")
    plain.touch()
    finished_run().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finished_run(trials=()).save(path)  # others are as the umask says
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


FROM_THE_FUTURE = {
    "from_the_future": {"a": 1},
    "dataloader_kwargs": {"num_workers": 2, "collate_fn": "os:system"},
    "wait_share": 0.5,
    "bottleneck": {"kind": "cpu", "sentence": "Bottleneck: CPU.", "from_the_future": 1},
    "extras": {"from_the_future": True},
}


def test_unknown_keys_are_ignored_and_few_are_needed(path):
    write(path)
    least = TuningResult.load(path)
    assert (least.best.num_workers, least.bottleneck, least.tolerance) == (2, None, 0.02)
    write(path, **FROM_THE_FUTURE)
    assert load_config(path) == LoaderConfig(num_workers=2)
    assert TuningResult.load(path).wait_share == 0.5


def kwargs(**values):
    return {"dataloader_kwargs": {"num_workers": 1, **values}}


NO_OUTCOME = [{"number": 0, "config": {}, "role": "search"}]
REFUSED = [
    ({"schema_version": 2}, "schema_version=2, newer than 1.*a newer release of autotune_loader"),
    ({"schema_version": None}, ": schema_version=None, and this release writes 1. Write one"),
    ({"schema_version": 0}, ": schema_version=0, and"),
    (b"[1]", ": schema_version=None, and"),
    (b'{"schema_version": 1}', ": missing key 'dataloader_kwargs'. Write one"),
    (b'{"schema_version": 1, "status": "comp', ""),
    (bytes(range(256)), ""),
    (b"[" * 100_000, ""),
    ({"seconds": math.nan}, "NaN is not a number in JSON"),
    (kwargs(num_workers=-1), "num_workers=-1 must be an integer >= 0. Try num_workers=1."),
    (kwargs(num_workers=10**9), "=1000000000 is larger than the maximum of 1024. Try"),
    (kwargs(multiprocessing_context="os.system"), "'os.system'"),
    ({"wait_share": "much"}, "wait_share"),
    ({"bottleneck": "CPU"}, "'CPU' is not a finding with a kind and a sentence"),
    (
        {"bottleneck": {"kind": "cpu", "sentence": "", "gain": "x"}},
        "gain='x' is not a number",
    ),
    ({"trials": NO_OUTCOME}, "exactly one of measurement and failure"),
    ({"trials": 3}, "trials=3 must be of type"),
]


@pytest.mark.parametrize(
    ("content", "told"), REFUSED, ids=[str(content)[:60] for content, _ in REFUSED]
)
def test_what_is_wrong_names_a_way_out(path, content, told):
    path.write_bytes(content) if isinstance(content, bytes) else write(path, **content)
    with pytest.raises(ConfigFileError, match=f"^path='{re.escape(str(path))}' .*{told}") as caught:
        TuningResult.load(path)
    assert "newer release" in told or "result.save('loader.json')" in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0.json"], ids=["missing", "folder", "0"])
def test_no_file_says_how_to_make_one(tmp_path, name):
    with pytest.raises(ConfigFileError, match=r"cannot be read .*output='loader\.json'"):
        load_config(tmp_path / name)


@given(st.integers(0, 64), st.integers(1, 128), st.integers(1, 128))
def test_fit_leaves_each_core_its_worker(workers, then, here):
    config = LoaderConfig(num_workers=workers)
    tuned_on, machine = replace(HERE, usable_cores=then), replace(HERE, usable_cores=here)
    fitted = fit(config, tuned_on, machine).num_workers
    assert min(workers, here) <= fitted <= workers
    # AND with fewer cores there are no more workers for each, beyond one
    assert fitted == workers if here >= then else fitted <= max(here, workers * here / then)


ALL = LoaderConfig(num_workers=8, prefetch_factor=4, pin_memory=True, device_prefetch=2)
EIGHT = replace(HERE, usable_cores=8, gpu="A100")
WITHOUT_GPU = {"pin_memory": False, "device_prefetch": 0}
MORE, FEWER = replace(EIGHT, usable_cores=64), replace(EIGHT, usable_cores=2)
TWO = {"num_workers": 2}


@pytest.mark.parametrize(
    ("here", "on_mismatch", "told", "changes"),
    [
        (MORE, "strict", None, {}),
        (FEWER, "fit", "usable cores: 8 when tuned, 2 here.*; changed to 2 workers", TWO),
        (FEWER, "ignore", None, {}),
        (FEWER, "strict", "8 when tuned, 2 here.*on_mismatch='fit'", None),
        (replace(EIGHT, gpu="T4"), "fit", "GPU: A100 when tuned, T4 here; the step takes", {}),
        (replace(EIGHT, gpu="none"), "fit", "none here.*; changed to 8 workers", WITHOUT_GPU),
        (replace(FEWER, gpu=None), "fit", "8 when tuned, 2 here.*; changed to 2 workers", TWO),
    ],
)
def test_another_machine_is_told(path, monkeypatch, here, on_mismatch, told, changes):
    finished_run(best=ALL, machine=EIGHT).save(path)
    machine = SimpleNamespace(fingerprint=lambda dataset, gpu: replace(here, dataset=dataset))
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


@pytest.mark.parametrize(("model", "is_same"), [("NVIDIA A100", True), ("NVIDIA H100", False)])
def test_strict_sees_the_gpu_without_cuda(model, is_same, path, tmp_path, monkeypatch):
    information = tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0/information"
    for file, text in ((information, f"Model: \t\t {model}\n"), (tmp_path / "dev/nvidia0", "")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    here = partial(visible_gpu, root=tmp_path, environ={})
    monkeypatch.setattr("autotune_loader.results.file.visible_gpu", here)
    finished_run(machine=replace(inspect_machine().fingerprint(), gpu="NVIDIA A100")).save(path)
    told = contextlib.nullcontext() if is_same else pytest.raises(MachineMismatchError, match=model)
    with told:
        load_config(path, on_mismatch="strict")


def test_a_job_names_its_file_or_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # nowhere else
    monkeypatch.setenv("AUTOTUNE_LOADER_CONFIG", "named.json")
    for workers, name in enumerate(("named.json", "loader.json", "config/autotune-loader/x.json")):
        TuningResult(best=LoaderConfig(num_workers=workers), status="complete").save(name)
    assert load_config("loader.json").num_workers == 1
    assert load_config().num_workers == 0
    Path("named.json").unlink()
    with pytest.raises(ConfigFileError, match=r"_CONFIG='named\.json' is not a file"):
        load_config()
    monkeypatch.delenv("AUTOTUNE_LOADER_CONFIG")
    assert load_config().num_workers == 1
    Path("loader.json").unlink()
    missing = re.escape(str(tmp_path / "loader.json"))
    with pytest.raises(ConfigFileError, match=f"there is no {missing}"):
        load_config()


def test_a_file_of_autoloader_warns_once(path):
    finished_run(found_by="autoloader", machine=None).save(path)
    with pytest.warns(UserWarning, match=r"Try AutoLoader\(dataset, ...") as caught:
        config = load_config(path)
    assert [each.filename for each in caught] == [__file__]
    # AND nothing else does
    assert TuningResult.load(path).best.to_kwargs() == config.to_kwargs()


@pytest.mark.process
def test_reading_a_file_needs_the_standard_library_alone(path):
    write(path)
    blocked = ["torch", "numpy", "psutil", "pynvml", "optuna", "pandas", "cloudpickle"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from autotune_loader import load_config\n"
        f"print(load_config({str(path)!r}).to_kwargs()['num_workers'])"
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
    one, eight = (result.predict(8, cores=cores).samples_per_s.value for cores in (1, 8))
    assert one < eight
    assert result.predict().config == result.best
    loaded = TuningResult.from_dict(result.to_dict()).predict(4).samples_per_s.value
    assert loaded == pytest.approx(result.predict(4).samples_per_s.value, rel=0.2)
    with pytest.raises(ValueError, match="cores=0 must be greater than 0, such as cores=2"):
        result.predict(cores=0)
    with pytest.raises(ValueError, match=r"needs at least one successful trial. Try "):
        TuningResult(best=LoaderConfig(), status="fallback").predict(2)
