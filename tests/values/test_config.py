"""`LoaderConfig`: what can be constructed works in a DataLoader, and what cannot names a value that does."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.values.config import START_METHODS, LoaderConfig

SAMPLES = TensorDataset(torch.arange(12).reshape(6, 2))


@st.composite
def configs(draw):
    """Every kind of legal configuration."""
    workers = draw(st.integers(0, 6))
    values = {
        "num_workers": workers,
        "pin_memory": draw(st.booleans()),
        "batch_size": draw(st.none() | st.integers(1, 1000)),
        "device_prefetch": draw(st.integers(0, 3)),
    }
    if workers:
        values |= {
            "prefetch_factor": draw(st.none() | st.integers(1, 8)),
            "persistent_workers": draw(st.booleans()),
            "in_order": draw(st.booleans()),
            "multiprocessing_context": draw(st.none() | st.sampled_from(START_METHODS)),
        }
    return LoaderConfig(**values)


@given(configs())
def test_every_config_constructs_a_loader_that_reads_back_the_same(config):
    loader = DataLoader(SAMPLES, batch_size=2, **config.to_kwargs())
    # THEN it has what the configuration says, as far as a loader can tell
    read = LoaderConfig.from_loader(loader)
    for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order"):
        assert getattr(read, name) == getattr(config, name), name
    assert read.multiprocessing_context == config.multiprocessing_context


@given(configs())
def test_json_brings_a_config_back_also_in_two_parts(config):
    whole = {**config.to_kwargs(), "device_prefetch": config.device_prefetch, "batch_size": config.batch_size}
    for written in (config.to_dict(), whole):
        assert LoaderConfig.from_dict(json.loads(json.dumps(written))) == config


@given(configs(), configs())
def test_words_tell_different_configs_apart(one, other):
    assert (str(one) == str(other)) == (one == other)


def test_kwargs_name_only_what_has_an_effect_and_an_unnamed_prefetch_factor_is_torchs_own():
    """DataLoader refuses what needs workers without them, and older ones what they do not know."""
    assert LoaderConfig().to_kwargs() == {"num_workers": 0, "pin_memory": False}
    with_one = {"num_workers": 1, "pin_memory": False, "prefetch_factor": 2, "persistent_workers": False}
    assert LoaderConfig(num_workers=1).to_kwargs() == with_one
    assert LoaderConfig(num_workers=3) == LoaderConfig(num_workers=3, prefetch_factor=2)
    assert LoaderConfig(num_workers=3).prefetch_factor == DataLoader(SAMPLES, num_workers=3).prefetch_factor


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"num_workers": -1}, ValueError),
        ({"num_workers": 1.5}, TypeError),
        ({"num_workers": 2, "prefetch_factor": 0}, ValueError),
        ({"prefetch_factor": 2}, ValueError),
        ({"persistent_workers": True}, ValueError),
        ({"in_order": False}, ValueError),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, ValueError),
        ({"pin_memory": 1}, TypeError),
        ({"batch_size": 0}, ValueError),
        ({"device_prefetch": -1}, ValueError),
    ],
    ids=str,
)
def test_a_wrong_value_is_answered_with_its_name_itself_and_one_that_works(values, kind):
    name, value = list(values.items())[-1]
    with pytest.raises(kind) as caught:
        LoaderConfig(**values)
    assert f"{name}={value!r}" in str(caught.value)
    # AND the value that it proposes does work
    proposals = re.findall(r"(\w+)=([^\s;,]+)", re.split(r"; (?:use )?", str(caught.value))[-1])
    assert proposals
    for proposed_name, proposed in proposals:
        LoaderConfig(**{**values, proposed_name: eval(proposed)})
