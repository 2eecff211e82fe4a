"""The oracle of `studies.regret.real` finds the best on a machine that changes its speed."""

import math
import random

import pytest

from autotune_loader.values import LoaderConfig
from studies.regret.bench import BenchError
from studies.regret.oracle import CONFIRMING_ROUNDS, HOPELESS, judge, key
from studies.regret.simulated import SimulatedField
from studies.regret.strategies import STRATEGIES
from tests.support import SimulatedMachine

FAST, NEAR, WORSE, SLOW, FAILING = (LoaderConfig(num_workers=n) for n in (4, 3, 2, 1, 9))
RATES = {FAST: 100.0, NEAR: 99.9, WORSE: 95.0, SLOW: 50.0}


class FakeBench:
    """Rates by configuration with 1 % noise, on a machine whose speed changes from round to round."""

    def __init__(self):
        self.asked = []

    def time(self, config, *, seconds, seed):
        self.asked.append(config)
        if config not in RATES:
            raise BenchError("no answer")
        return RATES[config] * (1 + 0.3 * math.sin(seed)) * math.exp(random.Random(len(self.asked)).gauss(0, 0.01))


def test_the_best_is_found_by_rounds_and_whoever_is_out_drops_out():
    # GIVEN the best, which nobody chose, one as good, one 5 % off, one 50 % off, and one that always fails
    bench = FakeBench()
    chosen = [key(each) for each in (NEAR, WORSE, SLOW, FAILING)]
    regrets = judge(bench, chosen, {key(FAST): 100.0, key(NEAR): 90.0})
    # THEN each has its regret, but for the one without any rate
    assert regrets[key(NEAR)].counted == 0.0
    assert regrets[key(WORSE)].counted == pytest.approx(0.05, abs=0.02)
    assert regrets[key(SLOW)].counted == pytest.approx(0.5, abs=0.03)
    assert key(FAILING) not in regrets
    # THEN who looked slower was judged by fresh rounds, and the hopeless one left after three
    assert regrets[key(WORSE)].ratio.count == CONFIRMING_ROUNDS
    assert bench.asked.count(SLOW) == 3
    assert regrets[key(SLOW)].ratio.high < HOPELESS


def test_every_strategy_chooses_on_a_simulated_machine():
    # GIVEN one on which loading binds
    machine = SimulatedMachine(cores=4, cpu_s=0.04, step_s=0.01)
    fields = {name: SimulatedField(machine, 0, limit_s=30.0) for name in STRATEGIES}
    chosen = {name: strategy(fields[name], 0) for name, strategy in STRATEGIES.items()}
    # THEN those that measure choose workers, and only those take time; who is asked to end does
    assert {name for name, config in chosen.items() if config.num_workers < 2} == {"torch default"}
    assert {name for name, field in fields.items() if field.clock() == 0} == {"torch default", "workers = cores"}
    assert all(field.clock() < 35 for field in fields.values())
