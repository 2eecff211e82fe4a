"""Why a loader costs time or memory: which cause is named, from when on, and what to do."""

from dataclasses import fields

import pytest

from autotune_loader.diagnosis import Account, Advice, Cause, Job, slow_rank
from autotune_loader.diagnosis.account import Fetching, account_of
from autotune_loader.diagnosis.causes import causes
from autotune_loader.loops.figures import LoopFigures
from autotune_loader.pipeline.forking import ParentProcess
from autotune_loader.pipeline.loop_log import Totals
from autotune_loader.pipeline.waits import Waits
from autotune_loader.values import LoaderConfig

RUN, ALLOW = "autotune-loader run train.py", "autotune-loader run --allow-workers train.py"
PARENT = ParentProcess(None, 1 << 30, is_elastic=False)


def totals(**changed):
    """100 batches in 10 epochs, 100 s."""
    known = {"epochs": 10, "batches": 100, "waited_s": 40.0, "stepped_s": 60.0}
    return Totals(**known | changed)


def case(account=None, waits=None, parent=PARENT, workers=4, is_persistent=False, **changed):
    """A loader of a script whose loops take 100 s, 60 of them in steps."""
    keeps = {"persistent_workers": is_persistent} if workers else {}
    figures = LoopFigures(LoaderConfig(num_workers=workers, **keeps))
    log = figures.log
    log.totals, log.waits, log.parent = changed.pop("totals", totals()), waits or Waits(), parent
    figures.batch_tensors = changed.pop("tensors", 0)
    active_s, is_tuned = changed.pop("script_s", 100.0), changed.pop("is_tuned", False)
    for name, value in changed.items():
        setattr(figures.of_workers, name, value)
    spent = Account(step=60.0, **({"computing": 40.0} if account is None else account))
    how = {"cores": 2, "on_accelerator": False, "to_tune": RUN, "to_allow": ALLOW}
    job = Job(active_s=active_s, is_tuned=is_tuned, **how)
    return figures, spent, "train.py:7", job


SLOW = Waits(batches=90, slow=3, slow_fetches_s=30.0, usual_s=0.1)
PINNED = Waits(batches=90, pinned_s=9.0)
MANY = {"account": {"transfer": 5.0}, "tensors": 16}
GARBAGE = {"account": {"computing": 40.0}, "garbage_s": 50.0}
COPIED = {"copied_bytes": 110 << 20}
IDLE = {"idle_bytes": 256 << 20, "idle_s": 100.0, "is_persistent": True}
LARGE = ParentProcess(None, 4 << 30, is_elastic=False)
# A cause, what shows it, its advice, and what else would not show it.
CASES = {
    Cause.WORKER_STARTS: (
        {"account": {"starting_workers": 3.0, "first_batches": 2.0}}, Advice.KEEP_WORKERS,
        {"account": {"starting_workers": 2.9, "first_batches": 2.0}},
        {"is_persistent": True}, {"totals": totals(epochs=1)}, {"workers": 0},
        {"waits": Waits(batches=10, fetched_s=1.0)},  # kept workers fetch first batches, too
    ),
    Cause.WORKER_IMPORTS: (
        {"account": {"first_batches": 8.0}, "ready_s": 4.0, "started": 20, "parent": None},
        Advice.START_ONCE, {"ready_s": 3.9}, {"started": 21}, {"parent": PARENT},
    ),
    Cause.WORKER_INIT: (
        {"account": {"first_batches": 8.0}, "ready_s": 4.0, "started": 20}, Advice.KEEP_WORKERS,
        {"ready_s": 3.9}, {"started": 21}, {"is_persistent": True}, {"totals": totals(epochs=1)},
    ),
    Cause.PINNING: ({"account": {"pinning": 5.0}, "waits": PINNED}, Advice.DO_NOT_PIN,
                    {"account": {"pinning": 4.9}}),
    Cause.MANY_TENSORS: (MANY, Advice.ONE_MESSAGE,
                         {"tensors": 15}, {"account": {"transfer": 4.9}}, {"workers": 0}),
    Cause.GARBAGE_COLLECTION: (GARBAGE, Advice.FREEZE, {"garbage_s": 49.0}),
    Cause.SLOW_SAMPLES: ({"account": {"slow_samples": 5.0}, "waits": SLOW}, Advice.LATE_BATCHES,
                         {"account": {"slow_samples": 4.9}}),
    Cause.CORES: ({"account": {"core": 10.0, "storage": 9.0}}, Advice.FEWER_WORKERS,
                  {"account": {"core": 9.9}}, {"account": {"core": 10.0, "computing": 11.0}}),
    Cause.STORAGE: ({"account": {"storage": 10.0, "core": 9.0}}, Advice.MORE_WORKERS,
                    {"account": {"storage": 9.9}},
                    {"account": {"storage": 10.0, "transfer": 11.0}}),
    Cause.COPIED_PAGES: (COPIED, Advice.SMALLER_WORKERS,
                         {"copied_bytes": 100 << 20}, {"parent": None}),
    Cause.TRAINING_MEMORY: ({"parent": LARGE}, Advice.FORKSERVER_BY_AUTOLOADER,
                            {"parent": PARENT}, {"parent": LARGE._replace(is_elastic=True)}),
    Cause.DEVICE_IN_WORKER: ({"on_device": 1, "started": 4}, Advice.LOAD_ON_CPU, {"on_device": 0}),
    Cause.IDLE_MEMORY: (IDLE, Advice.LET_WORKERS_GO, {"idle_bytes": 255 << 20}, {"idle_s": 99.0}),
}  # fmt: skip


def named(**changed):
    return [each.kind for each in causes(*case(**changed))]


OF_LOOP = (
    {"account": {}, "totals": totals(step_garbage_s=5.0)}, Advice.FREEZE,
    {"totals": totals(step_garbage_s=4.9)},
)  # fmt: skip


@pytest.mark.parametrize(("cause", "its"), [*CASES.items(), (Cause.GARBAGE_COLLECTION, OF_LOOP)])
def test_a_cause_is_named_from_its_limit_on(cause, its):
    shown, advice, *others = its
    (found,) = causes(*case(**shown))
    assert found.kind == cause.kind
    assert "train.py:7" in found.sentence
    figures = {"workers": 4, "command": RUN, "where": "train.py:7"}
    assert found.advice == str(advice(**figures))
    for other in others:
        assert cause.kind not in named(**{**shown, **other})


HEALTHY = {"account": {"computing": 4.0, "storage": 4.0, "transfer": 4.0, "starting_workers": 1.0}}


def test_nothing_is_named_where_nothing_costs():
    assert named(**HEALTHY) == []
    # AND not of a few batches, nor of a loader that takes little beside others, or in all
    short = {"account": {"storage": 40.0}}
    assert named(**short, totals=totals(batches=7)) == []
    assert named(**short, script_s=500.0) == []
    assert named(account={"storage": 0.09}, script_s=0.1) == []


def test_a_loader_without_workers_is_allowed_some():
    (found,) = causes(*case({"storage": 40.0}, workers=0))
    assert found.advice == str(Advice.MORE_WORKERS(command=ALLOW))


def test_what_costs_most_comes_first():
    found = {"account": {"pinning": 6.0, "slow_samples": 7.0, "starting_workers": 8.0}, **COPIED}
    slow = Waits(batches=90, slow=3, usual_s=0.1, pinned_s=9.0)
    kinds = ["worker_starts", "slow_samples", "pinning", "copied_pages"]
    assert named(**found, waits=slow) == kinds


def test_garbage_collections_copy_pages_themselves():
    assert named(**GARBAGE, **COPIED) == ["garbage_collection"]


@pytest.mark.parametrize(
    ("shown", "advice"),
    [
        (CASES[Cause.WORKER_IMPORTS][0], Advice.KEEP_WORKERS),
        (CASES[Cause.SLOW_SAMPLES][0], Advice.OUT_OF_ORDER),
        (MANY, Advice.STACK),
        (CASES[Cause.STORAGE][0], Advice.LARGER_READS),
        ({**CASES[Cause.CORES][0], "workers": 1}, Advice.MORE_CORES),
    ],
)
def test_run_names_no_command_that_runs_already(shown, advice):
    (found,) = causes(*case(**shown, is_tuned=True))
    assert found.advice == str(advice())


def accounts(*waits, steps=None):
    seconds = steps or [100.0 - each for each in waits]
    return [Account(step=step, storage=wait) for wait, step in zip(waits, seconds, strict=True)]


def test_the_rank_that_others_wait_for_is_named():
    ranks = zip(accounts(5.0, 35.0), ["a", "Bottleneck: CPU."], strict=True)
    found = slow_rank("train.py:7", [*ranks])
    its = Cause.SLOW_RANK(where="train.py:7", rank=1, its=35.0, other=0, others=5.0)
    assert found.sentence == str(its)
    assert found.seconds == 30.0
    assert found.advice == str(Advice.BALANCE_RANKS(rank=1, bottleneck="Bottleneck: CPU."))


@pytest.mark.parametrize(
    "alike",
    [
        accounts(5.0), accounts(5.0, 14.0),  # a rank, and ranks that wait about as long
        accounts(5.0, 35.0, steps=[65.0, 65.0]),  # nobody waits in the steps of another
    ],
)  # fmt: skip
def test_no_rank_is_named_without_cause(alike):
    assert slow_rank("train.py:7", [(each, "a") for each in alike]) is None


def test_steps_that_wait_for_a_rank_are_waiting():
    ranks = [Account(step=95.0, storage=5.0), Account(step=65.0, storage=35.0)]
    first, slow = (each.beside(ranks) for each in ranks)
    assert first == Account(step=65.0, storage=5.0, slow_rank=30.0)
    assert first.accelerator_utilization == 0.65
    assert slow == ranks[1]
    # AND not where there are fewer seconds of steps
    assert Account(step=20.0).beside(ranks) == Account(step=20.0)


# Where each second went


def test_an_account_adds_up():
    loops = totals(made_s=1.0, started_s=12.0, evaluated_s=3.0, saved_s=2.0, paused_s=1.5)
    waits = Waits(
        batches=90, waited_s=28.0, pinning_s=2.0, transfer_s=4.0, unready_s=1.0, slow=3, slow_s=6.0
    )
    fetching = Fetching(seconds=1.0, cpu_s=0.5, queued_s=0.2, receive_queued_s=0.01)
    found = account_of(loops, waits, fetching, has_workers=True)
    assert found.wall == pytest.approx(loops.wall_s)
    assert found.waiting == pytest.approx(40.0)
    # THEN the first batches are what they take beyond others, 28 s for 90
    usual_s = 28.0 / 90
    first_s = 12.0 - 1.0 - 10 * usual_s
    scale = (40.0 - 1.0 - first_s) / 28.0
    assert found.first_batches == pytest.approx(first_s + scale * 1.0)
    assert found.starting_workers == 1.0
    parts = {"pinning": 2.0, "slow_samples": 6.0, "computing": 15 * 0.5, "storage": 15 * 0.3}
    for name, seconds in parts.items():
        assert getattr(found, name) == pytest.approx(scale * seconds), name
    assert found.core == pytest.approx(scale * 15 * 0.2 + 1.0)
    assert found.transfer == pytest.approx(scale * 4.0 - 1.0)
    assert found.to_plain() == {
        "wall": found.wall,
        **{each.name: getattr(found, each.name) for each in fields(found)},
    }


def test_utilization_is_the_share_of_steps():
    """As MLPerf Storage defines it: evaluation and checkpoints are not among its time."""
    assert Account(step=60.0, storage=20.0, evaluation=50.0).accelerator_utilization == 0.75
    assert Account(storage=20.0).accelerator_utilization is None


@pytest.mark.parametrize(
    ("waits", "fetching", "part"),
    [
        (Waits(), Fetching(), "unknown"),  # no history, and no clock
        (Waits(), Fetching(seconds=1.0, cpu_s=1.0), "computing"),
        (
            Waits(batches=90, waited_s=30.0, slow=19, slow_s=30.0),
            Fetching(seconds=1.0, cpu_s=1.0),
            "computing",
        ),
        (
            Waits(batches=90, waited_s=30.0, slow=18, slow_s=30.0),
            Fetching(seconds=1.0, cpu_s=1.0),
            "slow_samples",
        ),
    ],
)
def test_the_rest_of_the_wait_has_one_part(waits, fetching, part):
    found = account_of(totals(), waits, fetching, has_workers=True)
    assert found.waiting == pytest.approx(40.0)
    assert getattr(found, part) == pytest.approx(40.0)


def test_without_workers_nothing_starts_any():
    found = account_of(totals(made_s=5.0, started_s=5.0), Waits(), Fetching(), has_workers=False)
    assert found.starting_workers == 0.0
    assert found.waiting == pytest.approx(40.0)
