"""An earlier result, checked: used while it holds, otherwise rejected with the reason, and its best tried early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune_loader import TuningResult, tune
from autotune_loader.decision.space import Limits, Space
from autotune_loader.results.loader_file import Finals, Measured
from autotune_loader.tuning.earlier import MOST_ROUNDS, ROUNDS, Check, check
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, on_simulated_machines

BEST = LoaderConfig(num_workers=3)
THEN = SimulatedMachine(cores=4, cpu_s=0.03, step_s=0.005)


def earlier(machine: SimulatedMachine = THEN, best: LoaderConfig = BEST) -> TuningResult:
    """What a search on this machine would have kept, noise-free."""
    probe = SimulatedProbe(machine, FakeClock())
    rates = [probe.truth(config) for config in (best, LoaderConfig())]
    known = Interval(value=rates[0], low=0.99 * rates[0], high=1.01 * rates[0], count=5)
    return TuningResult(
        best=best,
        status="complete",
        baseline=LoaderConfig(),
        measured=Measured(samples_per_s=known),
        finals=Finals(configs=(best, LoaderConfig()), rounds=(tuple(rates),)),
    )


def checked(
    now: SimulatedMachine | SimulatedProbe, then: TuningResult | None = None, *, space: Space | None = None
) -> Check:
    probe = now if isinstance(now, SimulatedProbe) else SimulatedProbe(now, FakeClock())
    return check(probe, then or earlier(), LoaderConfig(), space or Space(max_workers=4), 0.02)


def test_on_the_same_machine_an_earlier_result_holds_after_the_fewest_rounds_in_three_seconds() -> None:
    clock = FakeClock()
    seen = checked(SimulatedProbe(THEN, clock))
    assert (seen.objection, len(seen.rounds), seen.bursts) == ("", ROUNDS, 2 * ROUNDS)
    assert seen.speedup is not None
    assert seen.speedup.value > 1.5
    assert clock() < 3.0


def times(factor: float) -> SimulatedMachine:
    """The machine, slower as a whole."""
    return replace(THEN, **{name: factor * getattr(THEN, name) for name in ("cpu_s", "step_s", "receive_s")})


class DisturbedAtFirst(SimulatedProbe):
    """Something takes the cores during the first burst."""

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        outcome = super().burst(config, plan)
        if len(self.bursts) > 1 or isinstance(outcome, Failure):
            return outcome
        rate = outcome.samples_per_s
        return replace(outcome, samples_per_s=replace(rate, value=rate.value / 3))


def test_a_round_that_was_disturbed_is_followed_by_others_before_it_costs_a_search() -> None:
    seen = checked(DisturbedAtFirst(THEN, FakeClock()))
    assert ROUNDS < len(seen.rounds) <= MOST_ROUNDS
    assert seen.objection == ""


def failing(which: LoaderConfig) -> SimulatedMachine:
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    return replace(THEN, fails=lambda config: failure if config == which else None)


OVERHEAD = SimulatedMachine(cpu_s=0.001, receive_s=0.03, step_s=0.01)
"""Batches that cost nothing to make and much to hand over."""
TIGHT = Space(max_workers=4, limits=Limits(memory_bytes=1 << 20))


@pytest.mark.parametrize(
    ("now", "then", "space", "objection", "bursts"),
    [
        pytest.param(times(0.85), None, None, "", 2 * ROUNDS, id="a little faster"),
        pytest.param(times(1.2), None, None, "", 2 * ROUNDS, id="a little slower"),
        pytest.param(replace(THEN, cpu_s=3 * THEN.cpu_s), None, None, "samples/s", 2 * ROUNDS, id="heavier samples"),
        pytest.param(replace(THEN, cpu_s=THEN.cpu_s / 3), None, None, "samples/s", 2 * ROUNDS, id="lighter samples"),
        pytest.param(replace(THEN, step_s=10 * THEN.step_s), None, None, "samples/s", 2 * ROUNDS, id="a heavier step"),
        pytest.param(replace(THEN, cores=1), None, None, "samples/s", 2 * ROUNDS, id="fewer cores"),
        pytest.param(OVERHEAD, earlier(OVERHEAD), None, "no longer as fast as 0 workers", 2 * ROUNDS, id="no faster"),
        pytest.param(failing(BEST), None, None, "it failed now (oom_killed): a worker was killed", 1, id="fails now"),
        pytest.param(failing(LoaderConfig()), None, None, "", 2 * ROUNDS, id="a baseline that fails"),
        pytest.param(THEN, None, TIGHT, "host memory", 0, id="no memory for it"),
        pytest.param(THEN, earlier(best=LoaderConfig()), None, "", ROUNDS, id="torch's default alone"),
    ],
)
def test_what_changed_for_good_or_cannot_be_used_now_is_a_reason_found_with_few_bursts_and_a_little_drift_is_none(
    now: SimulatedMachine, then: TuningResult | None, space: Space | None, objection: str, bursts: int
) -> None:
    seen = checked(now, then, space=space)
    assert objection in seen.objection
    assert (bool(seen.objection), seen.bursts) == (bool(objection), bursts)


# tune(), on simulated machines


class Rows:
    """A dataset whose batches come from a simulated machine."""

    def __init__(self, machine: SimulatedMachine = THEN) -> None:
        self.machine = machine

    def __len__(self) -> int:
        return 40_000

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index))


Call = Callable[..., TuningResult]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Call:
    """`tune()` with two trials."""
    on_simulated_machines(monkeypatch, lambda workload: workload.data.dataset.machine)
    given = {"budget": 20, "max_trials": 2, "max_workers": 2, "batch_size": 32, "progress": False}
    return lambda dataset, **options: tune(dataset, None, **{**given, **options})


def test_the_second_call_uses_the_first_ones_result_and_says_so(quick: Call, tmp_path: Path) -> None:
    first = quick(Rows())
    second = quick(Rows(), output=tmp_path / "loader.json")
    # THEN its result is used after a few bursts, complete, with the evidence of the search
    assert first.reused is None
    assert second.reused is not None
    assert second.reused.rounds >= ROUNDS
    assert (second.best, second.status, len(second.trials)) == (first.best, first.status, len(first.trials))
    assert second.spent.bursts <= 2 * MOST_ROUNDS
    assert any(sentence.startswith("Reused: tuned at ") for sentence in second.summary[:2])
    assert (first.study is None, second.study) == (False, None)
    # AND the file is written, and makes a loader
    assert TuningResult.load(tmp_path / "loader.json").reused == second.reused
    assert second.make_loader(Rows()).batch_size == 32


def test_a_result_that_no_longer_holds_is_rejected_with_the_reason_and_tried_early(quick: Call) -> None:
    # GIVEN a run on a dataset that then became twice as slow
    first = quick(Rows())
    slower = Rows(replace(THEN, cpu_s=2 * THEN.cpu_s))
    # WHEN the same is asked again
    second = quick(slower)
    # THEN it is tuned anew, with the earlier best among the first, and the reason is told
    assert second.reused is None
    assert first.best in [trial.config for trial in second.trials[:2]]
    assert any("was not reused: " in warning for warning in second.warnings)
    # AND the new one holds for the next call, without that old story
    third = quick(slower)
    assert third.reused is not None
    assert not any("was not reused" in warning for warning in third.warnings)


def test_what_was_not_decided_is_tuned_anew(quick: Call) -> None:
    assert quick(Rows(), budget=2).status == "undecided"
    assert quick(Rows(), budget=2).reused is None


def test_when_everything_is_tuned_anew(quick: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # GIVEN an earlier result WHEN it is not wanted, a study is to be gone on with, or more trials are granted
    quick(Rows())
    for options in ({"reuse": False}, {"storage": tmp_path / "study.journal"}, {"max_trials": 4}):
        # THEN the search runs, and its result is kept for later
        assert quick(Rows(), **options).reused is None
    assert quick(Rows()).reused is not None
    # AND with the cache off nothing is used
    monkeypatch.setenv("AUTOTUNE_LOADER_CACHE", "off")
    assert quick(Rows()).reused is None
