"""`LoaderConfig`: what can be constructed works in a DataLoader, and what cannot names a value that does."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.values.config import SHARING_STRATEGIES, START_METHODS, LoaderConfig

SAMPLES = TensorDataset(torch.arange(12).reshape(6, 2))


@st.composite
def configs(draw, most_workers=6):
    """Every kind of legal configuration."""
    workers = draw(st.integers(0, most_workers))
    values = {
        "num_workers": workers,
        "pin_memory": draw(st.booleans()),
        "drop_last": draw(st.none() | st.booleans()),
        "batch_size": draw(st.none() | st.integers(1, 1000)),
        "device_prefetch": draw(st.integers(0, 3)),
        "consumer_threads": draw(st.none() | st.integers(1, 64)),
        "sharing_strategy": draw(st.none() | st.sampled_from(SHARING_STRATEGIES)),
    }
    if workers:
        values |= {
            "prefetch_factor": draw(st.none() | st.integers(1, 8)),
            "persistent_workers": draw(st.booleans()),
            "in_order": draw(st.booleans()),
            "multiprocessing_context": draw(st.none() | st.sampled_from(START_METHODS)),
        }
    return LoaderConfig(**values)


def loader_of(config):
    with warnings.catch_warnings():
        # Torch's own opinion on more workers than cores, on the machine that runs the tests.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return DataLoader(SAMPLES, batch_size=2, **config.to_kwargs())


@given(configs())
def test_every_config_constructs_a_loader_that_reads_back_the_same(config):
    # WHEN a loader is made of any legal configuration
    loader = loader_of(config)
    # THEN it has what the configuration says, as far as a loader can tell
    read = LoaderConfig.from_loader(loader)
    for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order"):
        assert getattr(read, name) == getattr(config, name), name
    assert read.multiprocessing_context == config.multiprocessing_context
    assert loader.drop_last == bool(config.drop_last)


@given(configs(most_workers=0))
@settings(max_examples=20)
def test_every_config_without_workers_yields_a_batch(config):
    assert len(first_batch(config)) == 2


# Pairs of options that DataLoader refuses, at once or on iteration.
# Two, because every example starts processes.
@pytest.mark.process
@given(configs(most_workers=2).filter(lambda c: c.num_workers and c.multiprocessing_context in (None, "fork")))
@settings(max_examples=4, suppress_health_check=[HealthCheck.filter_too_much])
def test_configs_with_workers_yield_a_batch(config):
    assert len(first_batch(config)) == 2


def first_batch(config):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator.*")
        iterator = iter(loader_of(config))
        batch = next(iterator)[0]
        getattr(iterator, "_shutdown_workers", lambda: None)()
    return batch


@given(configs())
def test_json_brings_a_config_back(config):
    assert LoaderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(configs())
def test_kwargs_and_extras_together_are_the_whole_config(config):
    whole = {**config.to_kwargs(), **config.to_extras(), "batch_size": config.batch_size}
    assert LoaderConfig.from_dict(json.loads(json.dumps(whole))) == config


@given(configs(), configs())
def test_words_tell_different_configs_apart(one, other):
    assert (str(one) == str(other)) == (one == other)


def test_kwargs_at_zero_workers_name_nothing_that_needs_workers():
    assert LoaderConfig().to_kwargs() == {"num_workers": 0, "pin_memory": False}


def test_kwargs_name_newer_arguments_only_when_they_differ_from_the_default():
    assert LoaderConfig(num_workers=1).to_kwargs() == {
        "num_workers": 1,
        "pin_memory": False,
        "prefetch_factor": 2,
        "persistent_workers": False,
    }


def test_an_unnamed_prefetch_factor_is_torchs_own():
    assert LoaderConfig(num_workers=3) == LoaderConfig(num_workers=3, prefetch_factor=2)
    assert LoaderConfig(num_workers=3).prefetch_factor == DataLoader(SAMPLES, num_workers=3).prefetch_factor


def test_unknown_keys_are_ignored_when_read():
    assert LoaderConfig.from_dict({"num_workers": 1, "from_the_future": 1}) == LoaderConfig(num_workers=1)


def test_a_loader_of_an_older_torch_without_in_order_is_read():
    class OlderLoader:
        num_workers, prefetch_factor, pin_memory, persistent_workers = 2, 4, True, True
        multiprocessing_context = None

    assert LoaderConfig.from_loader(OlderLoader()) == LoaderConfig(
        num_workers=2, prefetch_factor=4, pin_memory=True, persistent_workers=True
    )


def test_a_loader_with_a_context_object_is_read():
    context = torch.multiprocessing.get_context("spawn")
    loader = DataLoader(SAMPLES, num_workers=1, multiprocessing_context=context)
    assert LoaderConfig.from_loader(loader).multiprocessing_context == "spawn"


WRONG = [
    ({"num_workers": -1}, ValueError),
    ({"num_workers": 1.5}, TypeError),
    ({"num_workers": True}, TypeError),
    ({"num_workers": "4"}, TypeError),
    ({"num_workers": None}, TypeError),
    ({"num_workers": 2, "prefetch_factor": 0}, ValueError),
    ({"num_workers": 2, "prefetch_factor": -3}, ValueError),
    ({"num_workers": 2, "prefetch_factor": 2.0}, TypeError),
    ({"prefetch_factor": 2}, ValueError),
    ({"persistent_workers": True}, ValueError),
    ({"in_order": False}, ValueError),
    ({"multiprocessing_context": "fork"}, ValueError),
    ({"num_workers": 1, "multiprocessing_context": "thread"}, ValueError),
    ({"pin_memory": 1}, TypeError),
    ({"num_workers": 1, "persistent_workers": None}, TypeError),
    ({"num_workers": 1, "in_order": "yes"}, TypeError),
    ({"drop_last": 0}, TypeError),
    ({"batch_size": 0}, ValueError),
    ({"batch_size": "32"}, TypeError),
    ({"device_prefetch": -1}, ValueError),
    ({"device_prefetch": None}, TypeError),
    ({"consumer_threads": 0}, ValueError),
    ({"consumer_threads": 1.0}, TypeError),
    ({"sharing_strategy": "carrier_pigeon"}, ValueError),
]


@pytest.mark.parametrize(("values", "kind"), WRONG, ids=lambda value: str(value))
def test_a_wrong_value_is_answered_with_its_name_itself_and_one_that_works(values, kind):
    # GIVEN a mapping whose last entry is wrong
    name, value = list(values.items())[-1]
    # WHEN a configuration is made of it
    with pytest.raises(kind) as caught:
        LoaderConfig(**values)
    # THEN the message names argument and value
    assert f"{name}={value!r}" in str(caught.value)
    # AND the value that it proposes does work
    proposals = re.findall(r"(\w+)=([^\s;,]+)", re.split(r"; (?:use )?", str(caught.value))[-1])
    assert proposals
    for proposed_name, proposed in proposals:
        LoaderConfig(**{**values, proposed_name: eval(proposed)})


def test_a_mistyped_field_is_refused():
    with pytest.raises(TypeError, match="num_worker"):
        LoaderConfig(num_worker=1)


def test_apply_sets_the_threads_and_nothing_else():
    # GIVEN a process with its own settings
    threads, strategy = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    try:
        # WHEN a configuration with one thread and no strategy is applied
        LoaderConfig(consumer_threads=1).apply()
        # THEN only the threads change
        assert torch.get_num_threads() == 1
        assert torch.multiprocessing.get_sharing_strategy() == strategy
    finally:
        torch.set_num_threads(threads)


def test_apply_sets_the_sharing_strategy():
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        LoaderConfig(sharing_strategy="file_system").apply()
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
