"""The search on simulated machines with a fake clock: order, ends, failures, interruptions, and how good the choice is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.decision.evidence import Ask
from autotune_loader.decision.space import Space
from autotune_loader.decision.stopping import StopReason
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_run, simulated_search

OWN = LoaderConfig(num_workers=2)
FAST_STEP = SimulatedMachine(step_s=0.001)


class Log:
    """A listener that keeps what it was told."""

    def __init__(self):
        self.trials, self.rounds, self.left = [], [], []

    def trial(self, state, trial, seconds_left):
        self.trials.append(trial)
        self.left.append(seconds_left)

    def finals_round(self, number, rates, seconds_left):
        self.rounds.append(number)


class Interrupting:
    """A probe that is interrupted at its n-th call, of either kind."""

    def __init__(self, probe, at):
        self.probe, self.left = probe, at

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def burst(self, config, plan):
        self._count()
        return self.probe.burst(config, plan)

    def step_ceiling(self, plan):
        self._count()
        return self.probe.step_ceiling(plan)


def run_on(machine, *, own=OWN, probe=None, seed=0, space=None, job=None, **options):
    clock = FakeClock()
    probe = probe or SimulatedProbe(machine, clock, seed=seed)
    simulated = getattr(probe, "probe", probe)
    simulated._clock = clock
    run = simulated_run(machine, space, own=own, **(job or {}))
    return simulated_search(probe, run, clock, seed=seed, **options), simulated, clock


# Order and ends


def test_a_search_tells_every_trial_and_round_and_begins_with_what_the_user_has():
    log = Log()
    found, _, _ = run_on(FAST_STEP, listener=log)
    # THEN the user's own configuration and torch's default come first, and trials are numbered from 0
    assert [trial.config for trial in found.trials[:2]] == [OWN, LoaderConfig()]
    assert [trial.role for trial in found.trials[:3]] == ["baseline", "default", "search"]
    assert [trial.number for trial in found.trials] == [*range(len(found.trials))]
    # AND the listener has heard of everything, as has the study
    assert log.trials == found.trials
    assert log.rounds == [*range(1, len(log.rounds) + 1)]
    assert min(log.left) >= 0
    recorded = [frozen.user_attrs["config"] for frozen in found.study.get_trials()]
    assert recorded == [trial.config.to_dict() for trial in found.trials]


def test_a_search_ends_at_the_ceiling_of_the_step():
    # GIVEN a step that two workers keep busy
    found, _, _ = run_on(SimulatedMachine(cpu_s=0.01, step_s=0.03))
    assert found.stop_reason is StopReason.CEILING
    assert len(found.trials) <= 8


@pytest.mark.parametrize(("search", "budget_s"), [("auto", 8.0), ("auto", 60.0), ("tpe", 30.0), ("grid", 30.0)])
def test_the_budget_holds_and_leaves_time_for_finals(search, budget_s):
    # GIVEN a machine on which no configuration reaches the ceiling
    found, _, clock = run_on(SimulatedMachine(step_s=0.005, noise_sd=0.03), search=search, budget_s=budget_s)
    # THEN the time is kept, but for one round that was under way
    assert clock() < budget_s + 5
    assert found.finals.rounds


# Optuna's TPE, left alone on a small grid, repeats itself.
@pytest.mark.parametrize("search", ["auto", "tpe", "grid"])
def test_no_config_is_tried_twice_and_a_grid_walks_the_whole_space(search):
    space = Space(max_workers=3, prefetch_factors=(1, 2))
    found, _, _ = run_on(FAST_STEP, search=search, max_trials=30, budget_s=500, space=space)
    configs = [trial.config for trial in found.trials]
    assert len(configs) == len(set(configs))
    assert search != "grid" or set(configs) == {*space.configs(), OWN, LoaderConfig()}


# Resuming


def test_a_resumed_search_keeps_its_trials_measures_none_again_and_goes_on_as_its_seed_says(tmp_path):
    def searched(name, max_trials):
        storage = str(tmp_path / name)
        return run_on(SimulatedMachine(noise_sd=0.03), storage=storage, max_trials=max_trials)

    def configs(found):
        return [trial.config for trial in found.trials]

    first, _, _ = searched("one.journal", 4)
    assert len(first.trials) == 4
    # WHEN it has all of its trials THEN none is run
    same, _, _ = searched("one.journal", 4)
    assert (same.trials[0].seconds, configs(same)) == (first.trials[0].seconds, configs(first))
    assert same.stop_reason is StopReason.OUT_OF_TRIALS
    # WHEN more are granted THEN others are, the same for a seed
    more, probe, _ = searched("one.journal", 9)
    assert configs(more)[:4] == configs(first)
    assert len(set(configs(more))) == len(more.trials) <= 9
    searched("other.journal", 4)
    assert searched("other.journal", 9)[1].bursts == probe.bursts


# Failures


def failing(kind, when):
    answer = Failure(kind=kind, phase="batches", message="no")
    return lambda config: answer if when(config) else None


class Hanging(SimulatedProbe):
    """Hangs with more workers than are safe."""

    safe = 0

    def burst(self, config, plan):
        if config.num_workers <= self.safe:
            return super().burst(config, plan)
        self._clock.advance(plan.deadline_s)
        return Failure(kind="deadline", phase="batches", message="hangs")


@pytest.mark.parametrize("kind", ["oom_killed", "deadline"])
@pytest.mark.parametrize(("cores", "own", "safe"), [(2, 8, 3), (16, None, 2)])
def test_where_workers_are_killed_or_hang_the_most_that_are_safe_are_found(kind, cores, own, safe):
    # GIVEN a job for which every worker helps, on a machine where few can be had
    machine = SimulatedMachine(cores=cores, cpu_s=0.01, wait_s=0.02, step_s=0.001)
    probe = Hanging(machine, FakeClock())
    probe.safe = safe
    if kind != "deadline":
        machine = replace(machine, fails=failing(kind, lambda config: config.num_workers > safe))
        probe = SimulatedProbe(machine, FakeClock())
    # WHEN it is searched, be it from a configuration that fails
    found, _, clock = run_on(machine, own=own and LoaderConfig(num_workers=own), probe=probe)
    # THEN these are chosen, in time
    assert found.finals.winner.num_workers == safe
    assert clock() <= 62


def test_where_a_fetch_takes_seconds_workers_are_tried_first_and_no_round_begins_that_does_not_fit():
    slow = {"own": None, "job": {"first_fetch_s": 3.1, "first_batch_s": 3.1}}
    found, _, _ = run_on(SimulatedMachine(cores=4, cpu_s=0.1, wait_s=3.0), **slow)
    assert found.trials[0].config.num_workers == 4
    assert all(trial.measurement for trial in found.trials)
    few = SimulatedMachine(cores=2, cpu_s=0.1, wait_s=3.0)
    found, _, clock = run_on(few, space=Space(max_workers=8), budget_s=25.0, **slow)
    assert found.fastest() is not None
    assert clock() <= 1.1 * 25


@pytest.mark.parametrize(
    ("seconds_left", "first_batch_s", "low", "high"),
    [
        pytest.param(50.0, 0.0, 20.0, 25.0, id="half of the budget is left to others"),
        pytest.param(1.0, 0.0, 15.0, 30.0, id="near the end no sooner than a normal burst would take"),
        pytest.param(1.0, 16.0, 48.0, 80.0, id="slow first batches are waited for"),
    ],
)
def test_a_burst_is_taken_for_a_hang_in_time(seconds_left, first_batch_s, low, high):
    clock = FakeClock()
    context = TwinContext(usable_cores=4, consumer_cores=1.0)
    source = BurstSource(
        Hanging(FAST_STEP, clock), Space(max_workers=4), context, [], lambda: seconds_left, first_batch_s
    )
    source.gather(LoaderConfig(num_workers=1), Ask())
    assert low <= clock() <= high


def test_a_failure_that_may_pass_is_tried_once_more():
    # GIVEN a configuration that fails the first time only
    answers = [Failure(kind="crashed", phase="start", message="chance", retryable=True)]
    machine = SimulatedMachine(
        step_s=0.001, fails=lambda config: answers.pop() if config.num_workers == 4 and answers else None
    )
    found, probe, _ = run_on(machine)
    assert all(trial.measurement for trial in found.trials)
    # THEN all of its bursts are counted, and those of the step on a cached batch
    beside = sum(len(each) for each in found.ceilings_beside.values())
    assert found.bursts == len(probe.bursts) + len(found.ceilings) + beside


# Interruptions


def test_an_interruption_at_any_moment_keeps_the_trials_and_the_rounds():
    # GIVEN how many calls a whole search makes, and its trials
    machine = SimulatedMachine(step_s=0.005)
    whole = Interrupting(SimulatedProbe(machine, FakeClock()), at=10_000)
    complete, _, _ = run_on(machine, probe=whole, max_trials=4)
    calls, kept, rounds = 10_000 - whole.left, 0, 0
    # WHEN it is interrupted at each of them
    for at in range(calls):
        try:
            found, _, _ = run_on(machine, probe=Interrupting(SimulatedProbe(machine, FakeClock()), at=at), max_trials=4)
        except KeyboardInterrupt:  # there is nothing to keep
            assert kept == 0
            continue
        # THEN every trial and round before it is kept, and none is left running
        assert (found.stop_reason, found.bursts) == (StopReason.INTERRUPTED, at + 1)
        done = found.finals.rounds if found.finals else ()
        assert kept <= len(found.trials)
        assert rounds <= len(done)
        kept, rounds = len(found.trials), len(done)
        assert [trial.config for trial in found.trials] == [trial.config for trial in complete.trials[:kept]]
        assert all(frozen.state.is_finished() for frozen in found.study.get_trials())
    assert (kept, rounds + 1) == (len(complete.trials), len(complete.finals.rounds))
