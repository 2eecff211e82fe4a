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
from autotune_loader.tuning.earlier import MOST_ROUNDS, ROUNDS, check
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
    now: SimulatedMachine, then: TuningResult | None = None, *, seed: int = 0, space: Space | None = None
) -> Any:
    probe = SimulatedProbe(now, FakeClock(), seed=seed)
    return check(probe, then or earlier(), LoaderConfig(), space or Space(max_workers=4), 0.02)


def test_on_the_same_machine_an_earlier_result_holds_after_the_fewest_rounds() -> None:
    seen = checked(THEN)
    assert (seen.objection, len(seen.rounds), seen.bursts) == ("", ROUNDS, 2 * ROUNDS)
    assert seen.speedup.value > 1.5


def test_a_check_takes_about_two_seconds() -> None:
    clock = FakeClock()
    check(SimulatedProbe(THEN, clock), earlier(), LoaderConfig(), Space(max_workers=4), 0.02)
    assert clock() < 3.0


SHORT_EPOCHS = SimulatedMachine(cores=4, cpu_s=0.01, step_s=0.03, worker_start_s=0.05)


def checked_by_epochs(epoch_batches: int, *, noise_sd: float = 0.0, seed: int = 0) -> tuple[Any, float]:
    """A check of a result whose finals ran whole epochs, and the seconds that it took."""
    machine = replace(SHORT_EPOCHS, noise_sd=noise_sd)
    probe = SimulatedProbe(replace(machine, noise_sd=0.0), FakeClock(), epoch_batches=epoch_batches)
    rates = [
        probe.burst(config, BurstPlan(max_s=3.0, min_s=1.0, whole_epochs=True)).samples_per_s
        for config in (BEST, LoaderConfig())
    ]
    then = replace(
        earlier(machine),
        measured=Measured(samples_per_s=rates[0]),
        finals=Finals(configs=(BEST, LoaderConfig()), rounds=((rates[0].value, rates[1].value),), whole_epochs=True),
    )
    clock = FakeClock()
    now = SimulatedProbe(machine, clock, seed=seed, epoch_batches=epoch_batches)
    seen = check(now, then, LoaderConfig(), Space(max_workers=4), 0.02, clock)
    return seen, clock()


def test_a_check_by_whole_epochs_takes_five_seconds_or_says_why() -> None:
    # GIVEN epochs of 1.5 s, of which workers run two in a burst
    seen, seconds = checked_by_epochs(50)
    # THEN one round is enough for a yes
    assert (seen.objection, len(seen.rounds), seen.why_long) == ("", 1, "")
    assert seconds <= 5.0
    # AND where a round takes longer, that is said
    seen, seconds = checked_by_epochs(150)
    assert (seen.objection, len(seen.rounds)) == ("", 1)
    assert f"the check took {seconds:.0f} s, because epochs are short and were run whole" in seen.why_long


def test_the_scatter_of_single_epochs_rejects_no_result_that_holds() -> None:
    assert [checked_by_epochs(30, noise_sd=0.08, seed=seed)[0].objection for seed in range(6)] == [""] * 6


@pytest.mark.acceptance
def test_noise_hardly_ever_costs_a_search() -> None:
    objections = [checked(replace(THEN, noise_sd=0.04), seed=seed).objection for seed in range(40)]
    assert sum(map(bool, objections)) <= 1


@pytest.mark.parametrize("slower", [0.85, 1.2])
def test_a_machine_that_is_a_little_slower_or_faster_as_a_whole_is_no_reason(slower: float) -> None:
    now = replace(THEN, cpu_s=THEN.cpu_s * slower, step_s=THEN.step_s * slower, receive_s=THEN.receive_s * slower)
    assert checked(now).objection == ""


@pytest.mark.parametrize(
    "now",
    [
        replace(THEN, cpu_s=3 * THEN.cpu_s),
        replace(THEN, cpu_s=THEN.cpu_s / 3),
        replace(THEN, step_s=10 * THEN.step_s),
        replace(THEN, cores=1),
    ],
    ids=["heavier samples", "lighter samples", "a heavier step", "fewer cores"],
)
def test_what_changed_for_good_is_a_reason_with_the_rates(now: SimulatedMachine) -> None:
    seen = checked(now)
    assert "samples/s" in seen.objection
    assert len(seen.rounds) == ROUNDS


class DisturbedAtFirst(SimulatedProbe):
    """Something takes the cores during the first burst."""

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        outcome = super().burst(config, plan)
        if len(self.bursts) > 1 or isinstance(outcome, Failure):
            return outcome
        rate = outcome.samples_per_s
        return replace(outcome, samples_per_s=replace(rate, value=rate.value / 3))


def test_a_round_that_was_disturbed_is_followed_by_others_before_it_costs_a_search() -> None:
    seen = check(DisturbedAtFirst(THEN, FakeClock()), earlier(), LoaderConfig(), Space(max_workers=4), 0.02)
    assert ROUNDS < len(seen.rounds) <= MOST_ROUNDS
    assert seen.objection == ""


def test_a_best_that_is_slower_than_the_baseline_is_rejected_whatever_its_rate() -> None:
    # GIVEN batches that cost nothing to make and much to hand over, and a record that says three workers were best
    now = SimulatedMachine(cpu_s=0.001, receive_s=0.03, step_s=0.01)
    assert "no longer as fast as 0 workers" in checked(now, earlier(now)).objection


def test_a_best_that_fails_now_is_rejected_at_once() -> None:
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    seen = checked(replace(THEN, fails=lambda config: failure if config == BEST else None))
    assert seen.objection == "it failed now (oom_killed): a worker was killed"
    assert seen.bursts == 1


def test_a_baseline_that_fails_now_does_not_matter() -> None:
    failure = Failure(kind="crashed", phase="batches", message="it crashed")
    seen = checked(replace(THEN, fails=lambda config: failure if config == LoaderConfig() else None))
    assert (seen.objection, seen.speedup) == ("", None)


def test_a_best_that_does_not_fit_into_the_memory_of_now_is_not_even_run() -> None:
    seen = checked(THEN, space=Space(max_workers=4, limits=Limits(memory_bytes=1 << 20)))
    assert "host memory" in seen.objection
    assert seen.bursts == 0


def test_where_the_best_is_torchs_default_it_is_checked_alone() -> None:
    seen = checked(THEN, earlier(best=LoaderConfig()))
    assert (seen.objection, seen.partner, seen.bursts) == ("", None, ROUNDS)


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_found_with_whole_epochs_is_checked_with_whole_epochs(whole: bool) -> None:
    class Noting(SimulatedProbe):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
            plans.append((config.num_workers, plan.whole_epochs))
            return super().burst(config, plan)

    plans: list[tuple[int, bool]] = []
    then = replace(earlier(), finals=replace(earlier().finals, whole_epochs=whole))
    check(Noting(THEN, FakeClock(), epoch_batches=16), then, LoaderConfig(), Space(max_workers=4), 0.02)
    # Without workers epochs are nothing but their batches.
    assert set(plans) == {(BEST.num_workers, whole), (0, False)}


# tune(), on simulated machines


class Rows:
    """A dataset whose batches come from a simulated machine."""

    def __init__(self, machine: SimulatedMachine = THEN, length: int = 40_000) -> None:
        self.machine, self.length = machine, length

    def __len__(self) -> int:
        return self.length

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
    # GIVEN a finished run
    first = quick(Rows())
    # WHEN the same is asked again
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


def test_a_result_of_short_epochs_is_reused_too(quick: Call) -> None:
    first = quick(Rows(SHORT_EPOCHS, length=8 * 32))
    assert first.finals.whole_epochs
    assert quick(Rows(SHORT_EPOCHS, length=8 * 32)).reused is not None


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


def test_with_the_cache_off_nothing_is_kept(
    quick: Call, monkeypatch: pytest.MonkeyPatch, cache_of_its_own: Path
) -> None:
    monkeypatch.setenv("AUTOTUNE_LOADER_CACHE", "off")
    quick(Rows())
    assert list(cache_of_its_own.iterdir()) == []
