"""Whatever the bytes, the arguments or the values: an answer of the promised kind, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autotune_loader import LoaderConfig, TuningResult, cli, load_config
from autotune_loader.values.errors import ConfigFileError
from tests.support.schema import loader_schema

SAVED = json.loads((Path(__file__).parent / "data" / "loader-1.0.json").read_text())
# The same examples each time, and no search for a smaller one: a failure names its example at once.
quick = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, part in inner for each in places(part, (*path, key)))]


PLACES = [place for place in places(SAVED) if place]


def replaced(place: tuple[Any, ...], value: Any) -> Any:
    document = json.loads(json.dumps(SAVED))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return document


def loaded(content: bytes) -> TuningResult | None:
    """What the file with this content holds; None where it was refused as it should be."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "loader.json")
        path.write_bytes(content)
        try:
            assert isinstance(load_config(path), LoaderConfig)
            return TuningResult.load(path)
        except ConfigFileError:
            return None


@quick
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    assert loaded(content) is None


@quick
@given(st.integers(0, 10**6), st.binary(max_size=3), st.integers(0, 40))
def test_a_damaged_file_is_read_or_refused(position: int, patch: bytes, cut: int) -> None:
    whole = json.dumps(SAVED).encode()
    at = position % len(whole)
    loaded(whole[:at] + patch + whole[at + cut :])


@settings(parent=quick, max_examples=200)
@given(st.sampled_from(PLACES), values)
def test_a_file_with_one_odd_value_is_refused_or_saved_again_by_the_schema(place: tuple[Any, ...], value: Any) -> None:
    result = loaded(json.dumps(replaced(place, value)).encode())
    if result is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loader.json")
        result.save(path)
        saved = json.loads(path.read_text(), parse_constant=pytest.fail)
    jsonschema.validate(saved, loader_schema())
    result.report()


words = st.text(max_size=12) | st.sampled_from(
    ["loader.json", "-o", "--to", "kwargs", "snippet", "--budget", "60s", "-1", "no.such.module:make", "--help", "--"]
)


@settings(parent=quick, max_examples=40)
@given(st.sampled_from(["tune", "show", "apply", "nonsense"]), st.lists(words, max_size=4))
def test_any_arguments_end_in_a_promised_exit_code(command: str, arguments: list[str]) -> None:
    # GIVEN a folder with a valid file in it
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder) if hasattr(contextlib, "chdir") else _here():
        Path("loader.json").write_text(json.dumps(SAVED))
        output, errors = io.StringIO(), io.StringIO()
        # WHEN a command gets odd arguments
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = cli.main([command, *arguments])
    # THEN it ends well, or says what is wrong without a traceback
    assert code in (0, 2)
    assert "Traceback" not in errors.getvalue()


def _here() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
