"""`LoaderConfig`: what can be made works in a DataLoader, and what cannot names what does."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.values.config import START_METHODS, LoaderConfig

SAMPLES = TensorDataset(torch.arange(12).reshape(6, 2))
ANYWHERE = {"pin_memory": st.booleans(), "batch_size": st.none() | st.integers(1, 1000)}
ANYWHERE |= {"num_workers": st.just(0), "device_prefetch": st.integers(0, 3)}
IN_WORKERS = {
    "num_workers": st.integers(1, 6),
    "prefetch_factor": st.none() | st.integers(1, 8),
    "persistent_workers": st.booleans(),
    "in_order": st.booleans(),
    "multiprocessing_context": st.none() | st.sampled_from(START_METHODS),
}
configs = st.builds(LoaderConfig, **ANYWHERE) | st.builds(LoaderConfig, **ANYWHERE | IN_WORKERS)


@given(configs)
def test_every_config_makes_a_loader_of_its_own(config):
    read = LoaderConfig.from_loader(DataLoader(SAMPLES, batch_size=2, **config.to_kwargs()))
    # THEN it has what the configuration says, as far as a loader can tell
    for name in ("pin_memory", *IN_WORKERS):
        assert getattr(read, name) == getattr(config, name), name


@given(configs)
def test_json_brings_a_config_back(config):
    extras = {name: getattr(config, name) for name in ("device_prefetch", "batch_size")}
    for written in (config.to_dict(), {**config.to_kwargs(), **extras}):
        assert LoaderConfig.from_dict(json.loads(json.dumps(written))) == config


@given(configs, configs)
def test_words_tell_different_configs_apart(one, other):
    assert (str(one) == str(other)) == (one == other)
    assert str(LoaderConfig(num_workers=1, prefetch_factor=4)) == "1 worker, prefetch 4"


def test_kwargs_name_only_what_has_an_effect():
    """DataLoader refuses what needs workers without them, and older ones what they do not know."""
    without = {"num_workers": 0, "pin_memory": False}
    assert LoaderConfig().to_kwargs() == without
    of_workers = {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}
    assert LoaderConfig(num_workers=1).to_kwargs() == {**without, **of_workers}
    # AND a prefetch factor that is not named is torch's own
    torchs = DataLoader(SAMPLES, num_workers=3).prefetch_factor
    assert LoaderConfig(num_workers=3).prefetch_factor == torchs


@pytest.mark.parametrize(
    ("values", "kind", "works"),
    [
        ({"num_workers": -1}, ValueError, "num_workers=1"),
        ({"num_workers": 1.5}, TypeError, "num_workers=1"),
        ({"num_workers": True}, TypeError, "num_workers=1"),
        ({"num_workers": 2, "prefetch_factor": 0}, ValueError, "prefetch_factor=1"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor=None num_workers=1"),
        ({"persistent_workers": True}, ValueError, "persistent_workers=False num_workers=1"),
        ({"in_order": False}, ValueError, "in_order=True num_workers=1"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, ValueError,
         "multiprocessing_context='fork'"),
        ({"num_workers": 1, "multiprocessing_context": "span"}, ValueError,
         "multiprocessing_context='spawn'"),
        ({"pin_memory": 1}, TypeError, "pin_memory=False"),
        ({"batch_size": 0}, ValueError, "batch_size=1"),
        ({"device_prefetch": -1}, ValueError, "device_prefetch=1"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_names_one_that_works(values, kind, works):
    name, value = list(values.items())[-1]
    with pytest.raises(kind, match=re.escape(f"{name}={value!r}")) as caught:
        LoaderConfig(**values)
    # AND the values that it proposes do work
    proposals = re.findall(
        r"(\w+)=([^\s,]+)", str(caught.value).rpartition(". Try ")[2].rstrip(".")
    )
    assert " ".join(map("=".join, proposals)) == works
    for proposed_name, proposed in proposals:
        LoaderConfig(**{**values, proposed_name: eval(proposed)})
