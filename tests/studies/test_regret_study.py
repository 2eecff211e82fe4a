from __future__ import annotations

import importlib
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Round

ROOT = Path(__file__).parents[2]
FAST, NEAR, SLOW = (LoaderConfig(num_workers=n) for n in (4, 3, 1))


@pytest.fixture(
    params=["regret.oracle", "regret.real", "regret.outcomes", "regret.simulated", "regret.belief", "fidelity.compare"]
)
def modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module(f"studies.{request.param}")


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("studies.regret.oracle")


class FakeBench:
    """Rates by configuration with 1 % noise, on a machine whose speed changes from round to round."""

    def __init__(self, rates: dict[LoaderConfig, float]) -> None:
        self.rates = rates
        self.asked: list[LoaderConfig] = []
        self.foreign: dict[int, float] = {}

    def time(self, config: LoaderConfig, timing: Any) -> Any:
        from studies.regret.bench import Timed

        self.asked.append(config)
        level = 1 + 0.3 * math.sin(timing.seed)
        noise = random.Random(len(self.asked)).gauss(0, 0.01)
        rate = self.rates[config] * level * math.exp(noise)
        return Timed(
            samples_per_s=rate,
            batches=10,
            window_s=1.0,
            wall_s=1.0,
            foreign_share=self.foreign.pop(len(self.asked), 0.0),
        )


def test_every_module_of_the_study_can_be_imported_without_measuring(modules: ModuleType) -> None:
    assert modules.__doc__


def test_rounds_find_the_fastest_although_the_machine_changes_speed(oracle: ModuleType) -> None:
    # GIVEN a choice that is 20 % off, one that is as good as the best, and the best, which nobody chose
    bench = FakeBench({FAST: 100.0, NEAR: 99.9, SLOW: 80.0})
    keys = [oracle.key(config) for config in (FAST, NEAR, SLOW)]
    known, rounds = {keys[0]: 100.0, keys[1]: 90.0}, []
    # WHEN they take turns
    oracle.run_rounds(bench, keys[1:], known, rounds, lambda latest: None)
    regrets = {key: oracle.regret_of(key, rounds) for key in keys}
    # THEN the one is told from the best, the other is not, and who was clearly out dropped out
    assert regrets[keys[2]].counted == pytest.approx(0.2, abs=0.03)
    assert min(regrets[keys[0]].counted, regrets[keys[1]].counted) == 0.0
    assert max(regrets[keys[0]].counted, regrets[keys[1]].counted) < 0.02
    assert bench.asked.count(SLOW) == oracle.LEAST_ROUNDS


def test_rounds_go_on_only_for_what_is_missing(oracle: ModuleType) -> None:
    # GIVEN rounds that are complete for one choice
    bench = FakeBench({FAST: 100.0, SLOW: 80.0})
    rounds: list[Round] = []
    oracle.run_rounds(bench, [oracle.key(FAST)], {oracle.key(FAST): 100.0}, rounds, lambda latest: None)
    before = len(rounds)
    # WHEN another choice turns up
    chosen = [oracle.key(FAST), oracle.key(SLOW)]
    oracle.run_rounds(bench, chosen, {oracle.key(FAST): 100.0}, rounds, lambda latest: None)
    # THEN it is paired with the best in a few more rounds, and asking again measures nothing
    assert len(rounds) == before + oracle.LEAST_ROUNDS
    oracle.run_rounds(bench, chosen, {oracle.key(FAST): 100.0}, rounds, lambda latest: None)
    assert len(rounds) == before + oracle.LEAST_ROUNDS


def test_a_choice_meets_a_leader_that_took_the_lead_late(oracle: ModuleType) -> None:
    # GIVEN a choice with all its rounds behind it, and a lead that somebody took in rounds without it
    fast, near, slow = map(oracle.key, (FAST, NEAR, SLOW))
    rounds = [Round(rates={near: 90.0, slow: 80.0}) for _ in range(oracle.ROUNDS)]
    rounds += [Round(rates={near: 90.0, fast: 100.0}) for _ in range(oracle.LEAST_ROUNDS)]
    assert oracle.regret_of(slow, rounds) is None
    # WHEN the rounds go on THEN it is judged by that leader
    bench = FakeBench({FAST: 100.0, NEAR: 90.0, SLOW: 80.0})
    oracle.run_rounds(bench, [slow], {}, rounds, lambda latest: None)
    assert oracle.regret_of(slow, rounds).counted == pytest.approx(0.2, abs=0.03)


def test_who_always_fails_does_not_keep_the_rounds_going(oracle: ModuleType) -> None:
    class Failing(FakeBench):
        def time(self, config: LoaderConfig, timing: Any) -> Any:
            from studies.regret.bench import BenchError

            if config == SLOW:
                raise BenchError("no answer")
            return super().time(config, timing)

    rounds: list[Round] = []
    chosen = [oracle.key(FAST), oracle.key(SLOW)]
    oracle.run_rounds(Failing({FAST: 100.0}), chosen, {}, rounds, lambda latest: None)
    assert len(rounds) <= oracle.ROUNDS + oracle.LEAST_ROUNDS
    assert oracle.regret_of(oracle.key(SLOW), rounds) is None


def test_neighbours_that_belong_there_do_not_spoil_a_round(oracle: ModuleType) -> None:
    beside = Round(rates={oracle.key(FAST): 100.0}, foreign_cpu_share=0.3)
    assert oracle.is_disturbed(beside)
    assert not oracle.is_disturbed(beside, foreign_limit=1.0)


def test_a_round_beside_foreign_work_is_run_again(oracle: ModuleType) -> None:
    # GIVEN a neighbour who uses half the machine during one burst of the first round
    bench = FakeBench({FAST: 100.0, SLOW: 80.0})
    bench.foreign = {1: 0.5}
    rounds: list[Round] = []
    seen: list[Round] = []
    # WHEN two configurations take turns
    chosen = [oracle.key(FAST), oracle.key(SLOW)]
    oracle.run_rounds(bench, chosen, {}, rounds, seen.append)
    # THEN that round is told, but does not count, neither now nor when the records are read again
    assert oracle.is_disturbed(seen[0])
    assert len(seen) == len(rounds) + 1
    assert oracle.counted_rounds(seen) == rounds


def test_depths_are_compared_between_configurations_that_differ_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    key = importlib.import_module("studies.regret.oracle").key
    compare = importlib.import_module("studies.fidelity.compare")
    shallow = LoaderConfig(num_workers=4, prefetch_factor=2)
    deep = LoaderConfig(num_workers=4, prefetch_factor=8, persistent_workers=True)
    alone = LoaderConfig(num_workers=5, prefetch_factor=8)
    ratios = compare.depth_ratios({key(shallow): 100.0, key(deep): 110.0, key(alone): 90.0, key(LoaderConfig()): 50.0})
    assert ratios == [pytest.approx(math.log(1.1))]


def test_a_window_is_compared_with_the_settled_rest_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    compare = importlib.import_module("studies.fidelity.compare")
    # GIVEN a run at half speed until the queues of 4 workers with a prefetch of 8 could have filled once
    config = LoaderConfig(num_workers=4, prefetch_factor=8)
    slow = [0.02 * (batch + 1) for batch in range(42)]
    ends = slow + [slow[-1] + 0.01 * (batch + 1) for batch in range(800)]
    # WHEN windows are read after 0, 1, 2 and 3 fills
    shares = compare.window_shares(ends, config)
    # THEN the first reads low, and the others what follows
    assert shares[0] < 0.9
    assert shares[1:] == [pytest.approx(1.0, abs=0.01)] * 3


def test_what_is_compared_takes_turns_and_is_held_against_its_own_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    compare = importlib.import_module("studies.fidelity.compare")
    asked: list[str] = []

    def arm(name: str, rate: float) -> Any:
        def run(number: int) -> dict[tuple[str, str], float]:
            asked.append(name)
            return {("case", name): rate * (1 + number)}

        return run

    # GIVEN two arms on a machine that gets faster from round to round
    # WHEN they take turns
    rounds = list(compare.in_turns([arm("fast", 110.0), arm("plain", 100.0)], 7))
    # THEN neither always runs first, and their ratio is known exactly
    assert {asked[2 * number] for number in range(7)} == {"fast", "plain"}
    told = compare.table(rounds, "plain").splitlines()
    assert "| case | fast | 7 | 440 | 1.100 | 1.100 to 1.100 | 9.5% |" in told
    assert "| case | plain | 7 | 400 | | | |" in told


def test_the_interval_of_a_median_goes_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    interval = importlib.import_module("studies.fidelity.compare").median_interval
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # Of nine, the second and the eighth: the median lies outside with a probability of 4 %.
    assert interval([float(value) for value in range(9)]) == (1.0, 7.0)


def test_a_choice_that_looks_slower_is_judged_by_fresh_rounds(oracle: ModuleType) -> None:
    # GIVEN rounds in which the best was lucky, so that a choice as fast looks 5 % slower, one that is, and one without hope
    fast, near, slow = map(oracle.key, (FAST, NEAR, SLOW))
    worse = oracle.key(LoaderConfig(num_workers=2))
    rates = {fast: 100.0, near: 95.0, worse: 95.0, slow: 50.0}
    rounds = [Round(rates={key: rate * (1 + 0.001 * n) for key, rate in rates.items()}) for n in range(3)]
    bench = FakeBench({FAST: 100.0, NEAR: 100.0, oracle.config_of(worse): 90.0, SLOW: 50.0})
    confirming: list[Round] = []
    # WHEN those that look slower meet it again
    oracle.confirm(bench, [near, worse, slow, fast], rounds, confirming, lambda latest: None)
    # THEN only the fresh rounds count for them, and for the others the old ones
    assert oracle.regret_of(near, rounds, confirming).counted < 0.02 < oracle.regret_of(near, rounds).counted
    assert oracle.regret_of(worse, rounds, confirming).counted == pytest.approx(0.1, abs=0.03)
    assert oracle.regret_of(slow, rounds, confirming) == oracle.regret_of(slow, rounds)
    assert SLOW not in bench.asked
    assert len(confirming) == oracle.CONFIRMING_ROUNDS
    # AND asking again measures nothing
    oracle.confirm(bench, [near, worse, slow, fast], rounds, confirming, lambda latest: None)
    assert len(confirming) == oracle.CONFIRMING_ROUNDS


def test_a_right_sized_choice_is_weighed_long_enough_to_tell_one_percent(oracle: ModuleType) -> None:
    # GIVEN rounds in which 8 workers were the fastest by luck, and choices of 6, of 5, and of 5 that nobody asks to be weighed
    fast, near, few, other = (LoaderConfig(num_workers=workers, prefetch_factor=2) for workers in (8, 6, 5, 4))
    keys = [oracle.key(config) for config in (fast, near, few, other)]
    rounds = [Round(rates=dict(zip(keys, (102.0, 99.0 + n, 100.0 + n, 99.0 + n), strict=True))) for n in range(3)]
    bench = FakeBench({fast: 100.0, near: 100.0, few: 100.0, other: 100.0})
    confirming: list[Round] = []
    # WHEN 6 and 5 are to be right-sized
    oracle.confirm(bench, keys, rounds, confirming, lambda latest: None, right_sized=keys[1:3])
    # THEN only those with far fewer workers are weighed, and by fresh rounds
    assert set(bench.asked) == {fast, few}
    assert len(confirming) == oracle.PLATEAU_ROUNDS
    assert oracle.regret_of(keys[2], rounds, confirming).ratio.count == oracle.PLATEAU_ROUNDS
    assert oracle.regret_of(keys[2], rounds, confirming).point < 0.01


def test_a_configuration_survives_its_key(oracle: ModuleType) -> None:
    config = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True, consumer_threads=1)
    assert oracle.config_of(oracle.key(config)) == config


def test_what_was_measured_is_read_back_and_reported(oracle: ModuleType, tmp_path: Path) -> None:
    from studies.regret.outcomes import report
    from studies.regret.records import Log

    # GIVEN the records of one workload with two strategies, one of which failed
    log, key = Log(tmp_path / "real.jsonl"), oracle.key
    choice = {"kind": "choice", "workload": "jpeg", "seed": 0, "history": []}
    log.append({**choice, "strategy": "autotune_loader", "config": key(FAST), "seconds": 12.0})
    log.append({**choice, "strategy": "climb 3 %", "config": key(SLOW), "seconds": 5.0})
    log.append({**choice, "strategy": "loadtune", "failure": "ValueError: no", "seconds": 1.0})
    log.append({"kind": "survey", "workload": "jpeg", "config": key(FAST), "samples_per_s": 100.0})
    for number in range(3):
        rates = {key(FAST): 100.0 + number, key(SLOW): 80.0 + number}
        log.append({"kind": "round", "workload": "jpeg", "number": number, "rates": rates})
    # WHEN the report is made from the file alone
    report(log.read(), tmp_path / "real.md")
    text = (tmp_path / "real.md").read_text()
    # THEN each strategy has its row, and the failure is told
    assert "| autotune_loader | 1 | 1 | 0.0% |" in text
    assert "ValueError: no" in text
    assert "no plateau" in text
    assert (tmp_path / "real.png").stat().st_size > 0


def test_a_plateau_counts_by_fewer_workers_and_by_what_they_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    simulated = importlib.import_module("studies.regret.simulated")

    def outcome(workers: int, regret: float, fewest: int = 4) -> Any:
        return simulated.Outcome(
            machine=0, kind="wait", cores=8, strategy=simulated.OURS, regret=regret, seconds=20.0, workers=workers,
            fastest_workers=10, fewest_workers=fewest,
        )  # fmt: skip

    # GIVEN machines whose fastest has 10 workers: few that are fast, few that are slower, too many, and no plateau at all
    seen = [outcome(5, 0.0), outcome(4, 0.03, fewest=6), outcome(8, 0.0), outcome(10, 0.0, fewest=9)]
    plateaus = importlib.import_module("studies.regret.plateaus").plateaus
    told = plateaus(seen)
    # THEN three of them have a plateau, and on one the choice is as few and as fast as it should be
    assert told.startswith(
        "3 plateaus: on 1 at least 30 % fewer workers than the fastest, at most 1 % slower; on 1 more"
    )
    assert plateaus(seen[3:]) == "no plateau"
    assert "on 1 slower; in the median 50% fewer workers and 0.0% slower (p90 3.0%)" in told
    # THEN the two on which half the workers would do are told apart
    assert told.endswith("where half the workers would do: on 1 of 2")


@pytest.fixture
def plain_rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("autotune_loader.decision.plain_rule").plain_rule


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # 1.15 x 4 + 1 = 5.6 workers keep up with a step of 10 ms
        ({"fetch_s": 0.04, "fetch_cpu_s": 0.01, "step_s": 0.01, "loop_s": 0.02}, (6, 2)),
        # few workers get a deeper queue
        ({"fetch_s": 0.02, "fetch_cpu_s": 0.01, "step_s": 0.01, "loop_s": 0.01}, (3, 4)),
        # more than the cores can feed are of no use: 8 x 1 + 1
        ({"fetch_s": 0.04, "fetch_cpu_s": 0.04, "step_s": 0.001, "loop_s": 0.02}, (9, 2)),
        # a loop without a step is limited by the cores alone
        ({"fetch_s": 0.04, "fetch_cpu_s": 0.04, "step_s": 0.0, "loop_s": 0.02}, (9, 2)),
        # fetching in the loop takes 3 ms, workers 4 ms
        ({"fetch_s": 0.001, "fetch_cpu_s": 0.001, "step_s": 0.002, "loop_s": 0.004}, (0, None)),
    ],
)
def test_the_plain_rule_reckons_workers_from_one_look(
    plain_rule: Any, seen: dict[str, float], expected: tuple[int, int | None]
) -> None:
    chosen = plain_rule(**seen, cores=8)
    assert (chosen.num_workers, chosen.prefetch_factor) == expected


def test_the_plain_rule_keeps_to_the_workers_that_are_allowed(plain_rule: Any) -> None:
    chosen = plain_rule(fetch_s=1.0, fetch_cpu_s=0.0, step_s=0.001, loop_s=0.5, cores=8, most_workers=32)
    assert chosen == LoaderConfig(num_workers=32, prefetch_factor=2)
