"""The options of `tune()`: every way to write them, and every mistake with a value that would work."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from autotune_loader import tune
from autotune_loader.tuning.options import OPTIONS, TuneOptions, parse_options

DEFAULTS = {name: inspect.signature(tune).parameters[name].default for name in OPTIONS}


def parsed(**changes):
    return parse_options({**DEFAULTS, **changes})


def test_the_defaults_of_tune_are_the_defaults_of_settings():
    assert parsed() == TuneOptions()


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        *(({"budget": text}, "budget_s", 60) for text in (60, "60", "60s", " 60 s ", "1m", "60sec")),
        *(({"budget": text}, "budget_s", 90) for text in (90.0, "1.5m", "1.5min")),
        ({"budget": "1h"}, "budget_s", 3600),
        *(({"max_host_memory": size}, "max_host_memory_bytes", 8 * 10**9) for size in (8e9, "8GB", "8 gb")),
        ({"max_shm": "512MiB"}, "max_shm_bytes", 512 * 2**20),
        ({"max_shm": "1.5KiB"}, "max_shm_bytes", 1536),
        ({"max_shm": None}, "max_shm_bytes", None),
        ({"max_workers": 0}, "max_workers", 0),
        ({"output": Path("a/loader.json")}, "output", "a/loader.json"),
        ({"storage": Path("a/study.journal")}, "storage", "a/study.journal"),
        *(({"allow": given}, "allow", frozenset({"in_order"})) for given in ("in_order", ["in_order"], {"in_order"})),
        *(({"progress": given}, "progress", read) for given, read in ((True, True), (False, False), (None, None))),
    ],
    ids=str,
)
def test_every_way_to_write_an_option_is_read(given, field, value):
    assert getattr(parsed(**given), field) == value


@pytest.mark.parametrize(
    ("option", "value", "kind", "expected"),
    [
        ("budget", "soon", ValueError, "budget='soon' cannot be read"),
        ("budget", 0.5, ValueError, "budget=0.5 is not at least 1 s; budget='60s' would work"),
        ("budget", float("nan"), ValueError, "budget=nan "),
        pytest.param("budget", 10**310, ValueError, "budget='60s' would work", id="more than a float holds"),
        ("budget", None, TypeError, "budget=None is neither seconds nor a text such as '60s'"),
        ("max_host_memory", "8 elephants", ValueError, "max_host_memory='8GB' would work"),
        ("max_shm", 0, ValueError, "max_shm=0 is not at least one byte; max_shm='8GB' would work"),
        ("max_trials", 0, ValueError, "max_trials=0 is below 1; max_trials=1 would work"),
        ("max_trials", 2.5, TypeError, "max_trials=2.5 is not an integer; max_trials=1 would work"),
        ("max_workers", -1, ValueError, "max_workers=-1 is below 0; max_workers=1 would work"),
        ("seed", -1, ValueError, "seed=-1 is below 0"),
        ("tolerance", 1, ValueError, "tolerance=1 is not a share between 0 and 1; tolerance=0.02 would work"),
        ("tolerance", "2%", TypeError, "tolerance='2%' is not a number; tolerance=0.02 would work"),
        ("search", "tpee", ValueError, "search='tpee' is not one of 'auto', 'tpe', 'grid', 'random'; search='tpe'"),
        ("progress", "onn", ValueError, "progress=True would work"),
        ("allow", ("in_order", "batch-size"), ValueError, "allow='batch_size' would work"),
        ("allow", 3, TypeError, "allow=3 is not a collection of names; allow=('batch_size',) would work"),
        ("storage", True, TypeError, "storage=True is not a path or URL; storage='study.journal' would work"),
        ("output", False, TypeError, "output=False is not a path; output='loader.json' would work"),
        ("study_name", 7, TypeError, "study_name=7 is not a text; study_name='my-study' would work"),
        ("max_cores", 0, ValueError, "max_cores=0"),
        ("stages", "no", TypeError, "stages='no' is not a bool; stages=False would work"),
    ],
)
def test_a_mistake_is_answered_with_the_option_its_value_and_one_that_works(option, value, kind, expected):
    with pytest.raises(kind) as caught:
        parsed(**{option: value})
    assert expected in str(caught.value)
    assert "would work" in str(caught.value)
