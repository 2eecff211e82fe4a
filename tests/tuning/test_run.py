"""What of workload, machine and `allow=` makes the space that is searched, and what a choice changes in training."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import TensorDataset

from autotune_loader.bursts.bench import accelerator_facts
from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.diagnosis import Caution
from autotune_loader.diagnosis.judge import changes_in_training
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.search.space import Limits, Space
from autotune_loader.tuning.run import common_space, make_run, parse_options
from autotune_loader.values import LoaderConfig
from tests.support import SimulatedMachine, with_workers
from tests.support.schedules import Stream
from tests.support.tuned import simulated_warmup


class Sharded(Stream):
    num_shards = 2


class ToldItsEpoch(TensorDataset):
    epoch = 0


def data(given=100, batch_size=8, **parts):
    """A dataset, or one of so many rows."""
    dataset = TensorDataset(torch.zeros(given, 3)) if isinstance(given, int) else given
    return DataSide.from_dataset(dataset, batch_size=batch_size, **parts)


LONG, TOLD, DROPPING = data(800), data(ToldItsEpoch(torch.zeros(100, 3))), data(Stream(100), drop_last=True)


def run_of(side=LONG, allow=(), training=None, own=None, max_workers=None, why_no_workers=None, **ready):
    workload = Workload(data=side, training=training or TrainingSide(), own_config=own)
    opened = OpenProbe(probe=None, warmup=simulated_warmup(SimulatedMachine(), **ready))
    machine = replace(inspect_machine(), why_no_workers=why_no_workers)
    return make_run(workload, opened, machine, parse_options(allow=allow, max_workers=max_workers))


@pytest.mark.parametrize(
    ("side", "sizes", "why"),
    [
        (data(), (None, 16, 32, 4), ""),
        (data(20), (None, 16, 4), ""),
        (data(Stream(100)), (None, 16, 32, 4), ""),
        (data(batch_size=None), (None,), "the DataLoader has no batch_size; one with a batch_size would work"),
        (data(1, batch_size=1), (None,), "an epoch of 1 samples has room for no other batch size than 1"),
    ],
    ids=["map-style", "a small epoch", "a stream", "no batches", "one sample"],
)
def test_batch_sizes_are_powers_of_two_around_the_users_own_or_it_is_said_why_not(side, sizes, why):
    assert run_of(side).space.batch_sizes == (None,)
    run = run_of(side, allow="batch_size")
    assert run.space.batch_sizes == sizes
    assert [why in note for note in run.notes if note.startswith("batch_size is not tuned")] == ([True] if why else [])


@pytest.mark.parametrize(
    ("side", "given", "most"),
    [
        (LONG, {}, 64),
        (LONG, {"max_workers": 3}, 3),
        (data(80), {}, 10),  # a worker beyond the batches of an epoch never gets one
        (data(Sharded(100)), {}, 2),
        (data(Stream(100)), {"most_workers": 1}, 1),
        (LONG, {"most_workers": 0}, 0),
        (LONG, {"why_no_workers": "this process is daemonic"}, 0),
    ],
    ids=["free", "asked", "epoch", "shards", "repeats", "shared file", "no process can be started"],
)
def test_no_more_workers_are_tried_than_are_right(side, given, most):
    run = run_of(side, **given)
    assert run.space.max_workers == most
    assert list(run.notes) == [why for name, why in given.items() if name == "why_no_workers"]
    # AND the user's own number is legal whatever it is
    own = with_workers(70)
    assert run_of(side, own=own, **given).space.veto(own) is None


SPAWNS = {"own": with_workers(1, multiprocessing_context="spawn")}
CUDA, WAIT = ({"training": TrainingSide(**part)} for part in ({"device": "cuda:1"}, {"train_step": StepTime(0.05)}))


@pytest.mark.parametrize(
    ("given", "knob", "unless_allowed", "allowed"),
    [
        (SPAWNS, "multiprocessing_context", "spawn", None),
        (SPAWNS, "in_order", (True,), (True, False)),
        # `set_epoch` is called on the dataset here; workers that live on keep the copy of the first epoch
        ({}, "persistent_workers", True, None),
        ({"side": TOLD}, "persistent_workers", False, True),
        (CUDA, "pin_memory", (True, False), None),
        (CUDA, "device_prefetch", (0,), (0, 1, 2)),
        (WAIT, "pin_memory", (False,), None),
        (WAIT, "device_prefetch", (0,), (0,)),
    ],
)
def test_what_is_searched_is_safe_here_or_allowed_and_the_rest_is_the_users_own(given, knob, unless_allowed, allowed):
    run = run_of(**given)
    assert getattr(run.space, knob) == unless_allowed
    assert run.baseline == given.get("own", LoaderConfig())
    assert allowed is None or getattr(run_of(allow=knob, **given).space, knob) == allowed


def test_the_accelerator_is_the_one_that_the_child_has_and_its_memory_is_what_no_other_job_holds(monkeypatch):
    # GIVEN 80 bytes, of which another job has 30, the child 10 and this process, whose model will be trained, 5
    asked = {"mem_get_info": (35, 80), "get_device_properties": SimpleNamespace(name="H100 MIG 1g.10gb")}
    for function, answer in asked.items():
        monkeypatch.setattr(torch.cuda, function, {torch.device("cuda:1"): answer}.get)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", Mock(side_effect=[10, 5]))
    run = run_of(**CUDA, **accelerator_facts(torch.device("cuda:1")))
    assert (run.space.limits.device_bytes, run.fingerprint.gpu) == (50, "H100 MIG 1g.10gb")
    assert run.identity.endswith(", H100 MIG 1g.10gb")
    # AND a step on the CPU has none
    assert accelerator_facts(torch.device("cpu")) == {}
    assert run_of().space.limits.device_bytes is None


def test_the_tightest_limits_of_all_ranks_hold_for_each():
    limits = (100, None, 50), (200, 70, 20), (100, 70, 20)
    one, other, both = (Limits(shm_bytes=shm, memory_bytes=memory, descriptors=fds) for shm, memory, fds in limits)
    ranks = [Space(max_workers=8, limits=one), Space(max_workers=6, limits=other)]
    assert common_space(ranks) == Space(max_workers=6, limits=both)


@pytest.mark.parametrize(
    ("best", "side", "row", "words"),
    [
        ({"batch_size": 32}, TOLD, Caution.BATCH_SIZE, "from 8 to 32: adjust the learning rate and its schedule"),
        ({"num_workers": 1, "in_order": False}, TOLD, Caution.OUT_OF_ORDER, "order of batches differs between runs"),
        ({"num_workers": 1, "persistent_workers": True}, TOLD, Caution.EPOCH_NOT_SEEN, "set_epoch()"),
        ({"num_workers": 3}, DROPPING, Caution.FEWER_SAMPLES, "an epoch has fewer samples"),
        ({"num_workers": 1}, DROPPING, None, ""),
        ({"num_workers": 1, "prefetch_factor": 4}, TOLD, None, ""),
    ],
)
def test_what_a_choice_changes_in_training_is_said(best, side, row, words):
    found = list(changes_in_training(LoaderConfig(**best), side))
    assert [each.kind for each in found] == ([] if row is None else [row.kind])
    assert all(words in each.sentence for each in found)
