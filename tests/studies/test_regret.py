"""Oracles find the best, what is written is judged, and a tie is called one."""

import math
import random

import pytest

from autotune_loader.values import Interval, LoaderConfig
from studies.regret import OURS, Outcome, machines, simulated, slow, table, verdict_of
from studies.regret.bench import BenchError
from studies.regret.oracle import CONFIRMING_ROUNDS, HOPELESS, counted, judge, key
from studies.regret.real import KEEP_UP, known_regret
from studies.regret.simulated import SimulatedField, study_machine
from studies.regret.strategies import STRATEGIES
from studies.workloads import WORKLOADS
from tests.support import SimulatedMachine

FAST, NEAR, WORSE, SLOW, FAILING = (LoaderConfig(num_workers=n) for n in (4, 3, 2, 1, 9))
RATES = {FAST: 100.0, NEAR: 99.9, WORSE: 95.0, SLOW: 50.0}


class FakeBench:
    """Rates by configuration with 1% noise, on a machine whose speed changes from round to round."""

    def __init__(self):
        self.asked = []

    def time(self, config, *, seconds, seed):
        self.asked.append(config)
        if config not in RATES:
            raise BenchError("no answer")
        return (
            RATES[config]
            * (1 + 0.3 * math.sin(seed))
            * math.exp(random.Random(len(self.asked)).gauss(0, 0.01))
        )


def test_the_best_is_found_by_rounds_and_whoever_is_out_drops_out():
    # GIVEN the best, which nobody chose, one as good, one 5% off, one 50% off, and one that always fails
    bench = FakeBench()
    chosen = [key(each) for each in (NEAR, WORSE, SLOW, FAILING)]
    judgement = judge(bench, chosen, {key(FAST): 100.0, key(NEAR): 90.0})
    near, worse, slow_one, failing = (judgement.ratio(each, judgement.leader) for each in chosen)
    # THEN each has its regret, but for the one without any rate
    assert counted(near) == 0.0
    assert counted(worse) == pytest.approx(0.05, abs=0.02)
    assert counted(slow_one) == pytest.approx(0.5, abs=0.03)
    assert failing is None
    # THEN who may be the best is judged by fresh rounds, of the two that are compared, and the hopeless one left after three
    assert worse.count == judgement.ratio(key(NEAR), key(WORSE)).count == CONFIRMING_ROUNDS
    assert (bench.asked.count(SLOW), judgement.ratio(key(SLOW), key(WORSE)).count) == (3, 3)
    assert slow_one.high < HOPELESS


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (1.05, 0.99, 1.12, "equal"),
        (1.01, 1.005, 1.015, "equal"),
        (1.05, 1.01, 1.09, "faster"),
        (0.90, 0.85, 0.95, "slower"),
    ],
)
def test_a_tie_is_called_a_tie(value, low, high, verdict):
    assert verdict_of(Interval(value=value, low=low, high=high, count=6)) == verdict
    rows = table([Outcome(job="jpeg", strategy="tpe", seconds=1.0, ours=[verdict])]).splitlines()
    cells = (
        [each.strip() for each in rows[0].split("|")],
        [each.strip() for each in rows[2].split("|")],
    )
    assert dict(zip(*cells, strict=True))[f"ours {verdict}"] == "1"


@pytest.mark.parametrize(
    ("workers", "regret"), [(None, 1.0), (0, 0.96), (24, 0.1), (27, 0.0), (32, 0.0)]
)
def test_the_truth_of_slow_batches_is_arithmetic(workers, regret):
    assert known_regret(workers, KEEP_UP["slow_batches"]) == pytest.approx(regret, abs=0.01)
    job = WORKLOADS["slow_batches"]()
    waits_s, step = job.dataset.get.args[0], job.train_step
    assert job.batch_size * waits_s.mean() / step.seconds == pytest.approx(KEEP_UP["slow_batches"])


def test_what_is_written_is_judged_by_an_oracle_that_is_kept(tmp_path, monkeypatch):
    # GIVEN a foreign machine of which an oracle knows 0 to 4 workers, and a result without any
    monkeypatch.setattr(machines, "COUNTS", range(5))
    monkeypatch.setattr(machines, "TRUTH_BATCHES", 500)
    monkeypatch.setattr(simulated, "BUDGET_S", 5.0)
    monkeypatch.setattr(simulated, "assembled", lambda search, seconds: Written())
    found = study_machine("foreign", 0, [OURS, "workers = cores"], tmp_path)
    # THEN that is judged, and nothing else that the search found
    assert [each.status for each in found] == ["undecided", ""]
    assert (found[0].workers, found[1].ours) == (0, ["slower"])
    assert found[0].regret > 0.5
    # WHEN it is judged again
    monkeypatch.setattr(machines.Oracle, "_fastest_at_a_glance", pytest.fail)
    assert study_machine("foreign", 0, [OURS, "workers = cores"], tmp_path) == found


class Written:
    best, status = LoaderConfig(), "undecided"


def test_seeds_in_a_row_have_each_foreign_law():
    assert sorted(machines.foreign_machine(seed)[0] for seed in range(60)) == sorted(
        6 * machines.FOREIGN
    )


def test_slow_batches_and_long_starts_are_tables_with_a_bar(monkeypatch, capsys):
    rows = [
        row for row in slow.machines() if row[0] in ("fetch 1 s, step 0.3 s", "warm after 70 s")
    ]
    monkeypatch.setattr(slow, "machines", lambda: rows)
    for name, less in {"SEEDS": 1, "COUNTS": (0, 16, 32), "WARM_BATCHES": 400}.items():
        monkeypatch.setattr(slow, name, less)
    slow.main()
    assert [line.split(" | ")[3] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "met",
        "met",
    ]


def test_every_strategy_chooses_on_a_simulated_machine():
    # GIVEN one on which loading binds
    machine = SimulatedMachine(cores=4, cpu_s=0.04, step_s=0.01)
    fields = {name: SimulatedField(machine, 0, limit_s=30.0) for name in STRATEGIES}
    chosen = {name: strategy(fields[name], 0) for name, strategy in STRATEGIES.items()}
    # THEN those that measure choose workers, and only those take time; who is asked to end does
    assert {name for name, config in chosen.items() if config.num_workers < 2} == {"torch default"}
    assert {name for name, field in fields.items() if field.clock() == 0} == {
        "torch default",
        "workers = cores",
    }
    assert all(field.clock() < 35 for field in fields.values())
