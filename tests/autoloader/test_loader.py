"""What an AutoLoader takes, refuses, may do, tells and hands on."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from autotune_loader import AutoLoader, LoaderConfig, TuningResult, load_config
from autotune_loader.autoloader.meter import measured
from tests.support.schedules import Fetched, Noise, Numbers, Stream, states

pytestmark = pytest.mark.process
TWO = LoaderConfig(num_workers=2)


@pytest.mark.parametrize("arguments", [{"batch_size": 3, "shuffle": True}, {"batch_size": None}])
def test_an_existing_loader_is_taken_over(arguments: dict[str, Any]) -> None:
    plain, runs = DataLoader(Numbers(10), **arguments), []
    for loader in (plain, AutoLoader(plain)):
        torch.manual_seed(0)
        runs.append([batch.tolist() for batch in loader])
    assert runs[0] == runs[1]


def test_arguments_win_over_loaders_configurations_over_arguments() -> None:
    plain = DataLoader(Numbers(10), batch_size=3)
    assert [*AutoLoader(plain, num_workers=0, collate_fn=len)] == [3, 3, 3, 1]
    wanted = LoaderConfig(num_workers=3, prefetch_factor=5)
    assert AutoLoader(Numbers(4), config=wanted, num_workers=1).config == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [  # the first two as torch
        ({"prefetch_factor": 4, "num_workers": 0}, "prefetch_factor option could only be"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"num_worker": 2}, "unexpected keyword argument 'num_worker'"),
        ({"tune": "yes"}, "tune='yes' is not a bool"),
        ({"fetch_threads": 4, "num_workers": 0}, "fetch_threads=4 .* Try num_workers=2"),
        ({"fetch_threads": 0}, "fetch_threads=0"),
        ({"max_workers": 0}, "max_workers=0"),
        ({"dataset": Stream(9), "fetch_threads": 4}, "fetch_threads=4 needs a map-style dataset"),
        ({"dataset": Subset(Fetched(4), [1]), "fetch_threads": 4}, "Fetched.__getitems__ .*=None"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_answered_with_working_ones(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        AutoLoader(**{"dataset": Numbers(4), **arguments})


def test_loaders_with_iterators_of_their_own_are_refused() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    with pytest.raises(TypeError, match="AutoLoader as the base class of Doubled"):
        AutoLoader(Doubled(Numbers(4)))


def own_init(worker: int) -> None:
    os.environ["WORKER"] = str(worker)


def seed_worker(worker: int) -> None:
    """As in PyTorch's notes on reproducibility."""
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def pl_worker_init_function(worker: int) -> None:
    """As Lightning's, by name."""
    own_init(worker)


pl_worker_init_function.__module__ = "lightning.fabric.utilities.seed"
HOW = {
    "prefetch_factor": 4,
    "persistent_workers": True,
    "timeout": 9,
    "multiprocessing_context": "fork",
}
WRAPPED = functools.wraps(torch.manual_seed)(lambda seed: own_init(seed))
"""As by dynamo."""


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({}, "too_short"),
        ({"num_workers": 2}, "too_short"),
        (HOW, "too_short"),  # they say how workers are, if there are any
        ({"num_workers": 0}, "no_consent"),
        ({"config": LoaderConfig()}, "no_consent"),
        ({"config": TWO}, "too_short"),
        ({"tune": False}, "frozen"),
        ({"num_workers": 2, "in_order": False}, "out_of_order"),
        ({"worker_init_fn": own_init}, "worker_init"),
        ({"worker_init_fn": torch.manual_seed}, "too_short"),  # it only seeds
        ({"worker_init_fn": WRAPPED}, "too_short"),
        ({"worker_init_fn": functools.partial(seed_worker), "num_workers": 2}, "too_short"),
        ({"worker_init_fn": pl_worker_init_function, "num_workers": 2}, "too_short"),
        ({"worker_init_fn": shutil.rmtree, "num_workers": 2}, "worker_init"),  # no better
        ({"dataset": Stream(9)}, "iterable"),
        ({"dataset": DataLoader(Numbers(8))}, "too_short"),  # writing AutoLoader is the consent
        ({"dataset": DataLoader(Numbers(8)), "num_workers": 0}, "no_consent"),
        ({"num_workers": 1}, "one_worker"),
        ({"num_workers": 2, "worker_init_fn": functools.partial(own_init)}, "worker_init"),
    ],
)  # fmt: skip
def test_when_workers_may_be_used(arguments: dict[str, Any], kept: str) -> None:
    loader = AutoLoader(**{"dataset": Numbers(8), **arguments})
    assert loader.kept is not None
    assert loader.kept.kind == kept
    # WHEN somebody makes it anew from its attributes, as Lightning does THEN the consent goes along
    names = ("num_workers", "tune", "worker_init_fn", "in_order")
    again = AutoLoader(loader.dataset, **{name: getattr(loader, name) for name in names})
    assert again.kept is not None
    assert again.kept.kind == kept


def test_findings_outlive_the_loader_and_are_saved(tmp_path: Path) -> None:
    loader = AutoLoader(Numbers(400), batch_size=4)
    for _ in loader:
        pass
    found, data = loader.found, loader.dataset
    loader.save(tmp_path / "loader.json")
    assert TuningResult.load(tmp_path / "loader.json").best == LoaderConfig()
    assert str(loader) == str(loader.result)
    del loader
    gc.collect()
    assert not any(data in gc.get_referents(each) for each in (found, found.log, found.__dict__))
    assert found.result.best == LoaderConfig()
    assert found.log.totals.batches == 100


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, "AutoLoader(Numbers, 0 workers, tuning)"),
        ({"num_workers": 2}, "AutoLoader(Numbers, 2 workers, tuning)"),
        ({"num_workers": 1}, "AutoLoader(Numbers, 1 worker)"),
        ({"num_workers": 2, "tune": False}, "AutoLoader(Numbers, 2 workers)"),
    ],
)
def test_its_repr_says_whether_it_tunes(arguments: dict[str, Any], shown: str) -> None:
    assert repr(AutoLoader(Numbers(4), **arguments)) == shown


def test_the_iterator_begun_last_counts() -> None:
    loader = AutoLoader(Numbers(40), batch_size=4)
    first = iter(loader)
    next(first)  # as PyTorch's tutorials do, to look at a batch
    list(zip(first, loader, strict=False))
    assert len(loader.log.rows) >= 8
    assert loader.log.totals.epochs == 2


def test_what_ours_raises_ends_tuning_alone(caplog: pytest.LogCaptureFixture) -> None:
    loader = AutoLoader(Numbers(40), batch_size=4)

    def broken(now: float, fit: Any) -> None:
        raise RuntimeError("ours")

    loader.found.tuner._look = broken  # type: ignore[union-attr, method-assign]
    assert len(list(loader)) == 10
    assert "no longer tunes" in caplog.text
    assert len(list(loader)) == 10
    assert caplog.text.count("no longer tunes") == 1


def test_where_another_thread_fetches_nothing_is_seeded() -> None:
    seen: list[Any] = []
    batches = iter(AutoLoader(Noise(8), batch_size=8, num_workers=0))
    seed, before = torch.initial_seed(), states()[1:3]
    thread = threading.Thread(target=lambda: seen.extend(next(batches).tolist()))
    thread.start()
    thread.join()
    assert len(seen) == 8
    assert states()[1:3] != before  # the thread draws from what there is, as with DataLoader
    assert torch.initial_seed() == seed


def test_metrics_are_those_since_the_last_call() -> None:
    loader = AutoLoader(Numbers(40), batch_size=4)
    assert loader.metrics() == {"num_workers": 0.0}
    list(loader)
    seen = loader.metrics("loader/")
    names = ("num_workers", "wait_s", "wait_share", "samples_per_s")
    assert set(seen) == {f"loader/{name}" for name in names}
    assert 0 < seen["loader/wait_share"] <= 1
    assert 0 < seen["loader/wait_s"] * 10 <= loader.log.totals.waited_s
    assert seen["loader/samples_per_s"] > 0
    assert loader.metrics() == {"num_workers": 0.0}


def test_where_torchs_own_iterator_runs_nothing_is_measured() -> None:
    loader = AutoLoader(Numbers(40), num_workers=0)
    assert len(list(loader)) == 40
    assert loader.metrics() == {"num_workers": 0.0}


def test_findings_so_far_are_told_and_saved(tmp_path: Path) -> None:
    loader = AutoLoader(Numbers(400), batch_size=4)
    list(loader)
    tuner, own = loader.found.tuner, measured(loader.log.rows)
    assert own is not None
    rate = dataclasses.replace(own.samples_per_s, value=12.8 * own.samples_per_s.value)
    other = dataclasses.replace(own, samples_per_s=rate)
    tuner.measured = {LoaderConfig(): [own], LoaderConfig(num_workers=8): [other]}
    tuner.is_trying = True
    assert (
        "Fastest trial so far: 8 workers, prefetch 2, 12.8x faster than 0 workers."
        in loader.report()
    )
    assert "Keep" not in loader.report()
    assert loader.kept is not None
    assert loader.kept.kind == "not_settled"
    # AND its file is for AutoLoader, as those who read it for another loader are told
    loader.save(tmp_path / "loader.json")
    with pytest.warns(UserWarning, match="found by AutoLoader"):
        config = load_config(tmp_path / "loader.json")
    assert AutoLoader(Numbers(4), config=tmp_path / "loader.json").config == config
