"""The options of `tune()`: every way to write them, and every mistake with a value that would work."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.tuning.options import ALLOWABLE, TuneOptions, parse_options
from autotune_loader.values.validation import parse_bytes, parse_seconds

OPTIONS = {
    "budget": "60s",
    "max_trials": None,
    "max_workers": None,
    "max_cores": None,
    "max_host_memory": None,
    "max_shm": None,
    "allow": (),
    "tolerance": 0.02,
    "search": "auto",
    "seed": 0,
    "isolation": "auto",
    "storage": None,
    "study_name": None,
    "reuse": True,
    "stages": True,
    "output": None,
    "progress": "auto",
}


def parsed(**changes):
    return parse_options({**OPTIONS, **changes})


def test_the_defaults_of_tune_are_the_defaults_of_settings():
    assert parsed() == TuneOptions()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (60, 60),
        (90.5, 90.5),
        ("60", 60),
        ("60s", 60),
        (" 60 s ", 60),
        ("1.5m", 90),
        ("3m", 180),
        ("2min", 120),
        ("45sec", 45),
        ("1h", 3600),
        ("2M", 120),
        (1, 1),
    ],
)
def test_a_budget_is_read(text, seconds):
    assert parsed(budget=text).budget_s == seconds


@pytest.mark.parametrize(
    ("budget", "kind"),
    [
        ("soon", ValueError),
        ("", ValueError),
        ("60 parsecs", ValueError),
        ("-5s", ValueError),
        ("1e9999", ValueError),
        ("9" * 400 + "s", ValueError),
        (0, ValueError),
        (0.5, ValueError),
        (-3, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (None, TypeError),
        (True, TypeError),
        ([60], TypeError),
        (10**310, ValueError),
        (-(10**310), ValueError),
    ],
    ids=str,
)
def test_an_unreadable_budget_is_answered_with_one_that_works(budget, kind):
    with pytest.raises(kind) as caught:
        parsed(budget=budget)
    assert str(caught.value).startswith(f"budget={budget!r}")
    assert "budget='60s' would work" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (None, None),
        (1024, 1024),
        (1.5e9, 1_500_000_000),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5KiB", 1536),
        ("64mb", 64 * 10**6),
        ("2GiB", 2**31),
        ("100", 100),
        ("100B", 100),
    ],
)
def test_a_size_is_read(text, size):
    found = parsed(max_host_memory=text, max_shm=text)
    assert found.max_host_memory_bytes == found.max_shm_bytes == size


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        ("8 elephants", ValueError),
        ("-8GB", ValueError),
        (0, ValueError),
        (-1, ValueError),
        (0.3, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (False, TypeError),
        ([8], TypeError),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["max_host_memory", "max_shm"])
def test_an_unreadable_size_is_answered_with_one_that_works(name, size, kind):
    with pytest.raises(kind) as caught:
        parsed(**{name: size})
    assert str(caught.value).startswith(f"{name}={size!r}")
    assert f"{name}='8GB' would work" in str(caught.value)


@settings(max_examples=40)
@given(st.text(max_size=12), st.sampled_from([parse_seconds, parse_bytes]))
def test_any_text_is_read_or_a_value_error_that_says_what_would_work(text, parse):
    try:
        outcome = parse("budget", text)
    except ValueError as error:
        outcome = error
    assert "would work" in str(outcome) if isinstance(outcome, ValueError) else outcome >= 1


@pytest.mark.parametrize("name", ALLOWABLE)
def test_every_allowable_name_may_be_given_alone_or_in_a_collection(name):
    assert parsed(allow=name).allow == parsed(allow=[name]).allow == parsed(allow={name}).allow == frozenset((name,))


@pytest.mark.parametrize(
    ("option", "value", "kind", "expected"),
    [
        ("max_trials", 0, ValueError, "max_trials=0 is below 1; max_trials=1 would work"),
        ("max_trials", 2.5, TypeError, "max_trials=2.5 is not an integer; max_trials=1 would work"),
        ("max_trials", True, TypeError, "max_trials=True is not an integer"),
        ("max_workers", -1, ValueError, "max_workers=-1 is below 0; max_workers=1 would work"),
        ("max_workers", "8", TypeError, "max_workers='8' is not an integer"),
        ("seed", -1, ValueError, "seed=-1 is below 0"),
        ("seed", "x", TypeError, "seed='x' is not an integer"),
        ("seed", None, TypeError, "seed=None is not an integer; seed=1 would work"),
        ("tolerance", 1, ValueError, "tolerance=1 is not a share between 0 and 1; tolerance=0.02 would work"),
        ("tolerance", -0.1, ValueError, "tolerance=-0.1 "),
        ("tolerance", float("nan"), ValueError, "tolerance=nan "),
        ("tolerance", "2%", TypeError, "tolerance='2%' is not a number; tolerance=0.02 would work"),
        ("tolerance", True, TypeError, "tolerance=True is not a number"),
        ("search", "tpee", ValueError, "search='tpee' is not one of 'auto', 'tpe', 'grid', 'random'; search='tpe'"),
        ("search", None, ValueError, "search=None is not one of"),
        ("search", ["tpe"], ValueError, "search=['tpe'] is not one of"),
        ("isolation", "proces", ValueError, "isolation='process' would work"),
        ("progress", "onn", ValueError, "progress='on' would work"),
        ("progress", 1, ValueError, "progress=1 is not one of"),
        ("allow", "batchsize", ValueError, "allow='batchsize' is not one of"),
        ("allow", ("in_order", "batch-size"), ValueError, "allow='batch_size' would work"),
        ("allow", 3, TypeError, "allow=3 is not a collection of names; allow=('batch_size',) would work"),
        ("allow", None, TypeError, "allow=None is not a collection of names"),
        ("allow", [["in_order"]], TypeError, "allow=[['in_order']] is not a collection of names"),
        ("allow", (1, "in_order"), TypeError, "allow=(1, 'in_order') is not a collection of names"),
        ("storage", True, TypeError, "storage=True is not a path or URL; storage='study.journal' would work"),
        ("storage", 3, TypeError, "storage=3 is not a path or URL"),
        ("output", False, TypeError, "output=False is not a path; output='loader.json' would work"),
        ("output", 1, TypeError, "output=1 is not a path"),
        ("study_name", 7, TypeError, "study_name=7 is not a text; study_name='my-study' would work"),
        ("max_cores", "two", TypeError, "max_cores='two'"),
        ("max_cores", 1.5, TypeError, "max_cores=1.5"),
        ("max_cores", 0, ValueError, "max_cores=0"),
        ("stages", "no", TypeError, "stages='no' is not a bool; stages=False would work"),
        ("reuse", "no", TypeError, "reuse='no' is not a bool; reuse=False would work"),
    ],
)
def test_a_mistake_is_answered_with_the_option_its_value_and_one_that_works(option, value, kind, expected):
    with pytest.raises(kind) as caught:
        parsed(**{option: value})
    assert expected in str(caught.value)
    assert "would work" in str(caught.value)


@pytest.mark.parametrize(("value", "means"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_progress_may_be_a_bool(value, means):
    assert parsed(progress=value).progress == means


def test_paths_become_text():
    found = parsed(output=Path("a/loader.json"), storage=Path("a/study.journal"))
    assert (found.output, found.storage) == ("a/loader.json", "a/study.journal")


def test_zero_workers_is_a_limit_that_may_be_set():
    assert parsed(max_workers=0).max_workers == 0
