"""The search on simulated machines with a fake clock: order, ends, failures, interruptions, and how good the choice is."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field, replace

import pytest

from autotune_loader.decision.acquisition import initial_design
from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.space import Space, max_useful_workers
from autotune_loader.decision.stopping import StopReason
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.session import TuningSession
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_run, simulated_search

OWN = LoaderConfig(num_workers=2)


@dataclass
class Log:
    """A listener that keeps what it was told."""

    trials: list = field(default_factory=list)
    rounds: list = field(default_factory=list)

    def trial(self, state, trial, seconds_left):
        self.trials.append((trial, state.fastest(), seconds_left))

    def finals_round(self, number, rates, seconds_left):
        self.rounds.append((number, rates, seconds_left))


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

    def step_ceiling(self, threads, plan):
        self._count()
        return self.probe.step_ceiling(threads, plan)


def run_on(machine, *, own=OWN, budget_s=60.0, probe=None, seed=0, space=None, listener=None, job=None, **options):
    clock = FakeClock()
    probe = probe or SimulatedProbe(machine, clock, seed=seed)
    simulated = getattr(probe, "probe", probe)
    simulated._clock = clock
    run = TuningSession(
        probe,
        simulated_run(machine, space or space_of(machine), own=own, **(job or {})),
        TuneOptions(budget_s=budget_s, seed=seed, **options),
        clock=clock,
        started=clock(),
        listener=listener or Log(),
        study_name="test",
    )
    return run.run(), simulated, clock


def believed(space, trials):
    """What these trials say of every configuration, on eight cores."""
    beliefs = Beliefs(space, TwinContext(usable_cores=8, consumer_cores=1.0, step_s=((None, 0.001),)))
    for trial in trials:
        beliefs.log.add(Evidence(config=trial.config, outcome=trial.measurement))
    return beliefs.posterior()


def space_of(machine, **changes):
    most = max_useful_workers(machine.cores, machine.cpu_s + machine.wait_s, machine.cpu_s)
    return Space(max_workers=most, **changes)


def seeds(count):
    """One of them in every run; the others are many simulated searches."""
    return [0, *(pytest.param(seed, marks=pytest.mark.acceptance) for seed in range(1, count))]


FAST_STEP = SimulatedMachine(step_s=0.001)


# Order and ends


def test_a_search_tells_every_trial_and_round_and_begins_with_what_the_user_has():
    log = Log()
    found, _, _ = run_on(FAST_STEP, listener=log)
    # THEN the user's own configuration and torch's default come first, and trials are numbered from 0
    assert [trial.config for trial in found.trials[:2]] == [OWN, LoaderConfig()]
    assert [trial.role for trial in found.trials[:3]] == ["baseline", "default", "search"]
    assert [trial.number for trial in found.trials] == [*range(len(found.trials))]
    # AND the listener has heard of everything, as has the study
    assert [trial for trial, _, _ in log.trials] == found.trials
    assert [number for number, _, _ in log.rounds] == [*range(1, len(log.rounds) + 1)]
    assert all(left >= 0 for _, _, left in log.trials)
    recorded = [frozen.user_attrs["config"] for frozen in found.study.get_trials()]
    assert recorded == [trial.config.to_dict() for trial in found.trials]


def test_without_an_own_config_torchs_default_is_the_baseline():
    found, _, _ = run_on(FAST_STEP, own=None)
    assert found.baseline == found.trials[0].config == LoaderConfig()
    assert len({trial.config for trial in found.trials}) == len(found.trials)


def test_a_search_ends_at_the_ceiling_of_the_step():
    # GIVEN a step that two workers keep busy
    found, _, _ = run_on(SimulatedMachine(cpu_s=0.01, step_s=0.03))
    # THEN the search ends there, soon
    assert found.stop_reason is StopReason.CEILING
    assert len(found.trials) <= 8


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("search", ["auto", "tpe", "random", "grid"])
@pytest.mark.parametrize("budget_s", [8.0, 30.0, 90.0])
def test_the_budget_holds_and_leaves_time_for_finals(search, budget_s, seed):
    # WHEN a machine is searched on which no configuration reaches the ceiling
    found, _, clock = run_on(SimulatedMachine(step_s=0.005, noise_sd=0.03), search=search, budget_s=budget_s, seed=seed)
    # THEN the time is kept, but for one round that was under way, and there were finals
    assert clock() < budget_s + 5
    assert found.finals is not None
    assert len(found.finals.rounds) >= 1


def test_no_more_trials_than_allowed():
    found, _, _ = run_on(FAST_STEP, max_trials=4)
    assert len(found.trials) == 4
    assert found.stop_reason is StopReason.OUT_OF_TRIALS


# Optuna's TPE, left alone on a small grid, repeats itself.
@pytest.mark.parametrize("search", ["auto", "tpe", "random", "grid"])
def test_no_config_is_tried_twice(search):
    found, _, _ = run_on(FAST_STEP, search=search, max_trials=30, budget_s=500, space=Space(max_workers=3))
    configs = [trial.config for trial in found.trials]
    assert len(configs) == len(set(configs))


def test_a_grid_walks_the_whole_space():
    space = Space(max_workers=3, prefetch_factors=(1, 2))
    found, _, _ = run_on(FAST_STEP, search="grid", budget_s=500, space=space)
    assert {trial.config for trial in found.trials} == {*space.configs(), OWN, LoaderConfig()}


def test_an_exhausted_random_search_ends_though_there_is_time():
    found, _, clock = run_on(FAST_STEP, search="random", budget_s=10_000, space=Space(max_workers=1))
    assert found.stop_reason is StopReason.SAMPLER_REPEATS
    assert clock() < 5_000


@pytest.mark.parametrize("search", ["auto", "tpe", "random"])
def test_the_same_seed_gives_the_same_search(search):
    def configs(seed):
        _, probe, _ = run_on(SimulatedMachine(noise_sd=0.03), seed=seed, search=search, max_trials=12)
        return probe.bursts

    assert configs(3) == configs(3)


def test_without_a_step_there_is_no_ceiling():
    clock, run = FakeClock(), simulated_run(FAST_STEP, space_of(FAST_STEP), has_step=False)
    found = simulated_search(SimulatedProbe(FAST_STEP, clock), run, clock)
    assert found.ceiling is None
    assert found.finals is not None


# Resuming


def test_a_resumed_search_keeps_its_trials_measures_none_again_and_goes_on_as_its_seed_says(tmp_path):
    def searched(name, max_trials):
        storage = str(tmp_path / name)
        return run_on(SimulatedMachine(noise_sd=0.03), storage=storage, max_trials=max_trials)

    def configs(found):
        return [trial.config for trial in found.trials]

    first, _, _ = searched("one.journal", 4)
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


def test_a_step_that_sleeps_keeps_no_core_busy():
    class Idle(Interrupting):
        def step_ceiling(self, threads, plan):
            return replace(self.probe.step_ceiling(threads, plan), cpu_share=0.01)

    machine = SimulatedMachine(step_cores=4.0)
    found, _, _ = run_on(machine, probe=Idle(SimulatedProbe(machine, FakeClock()), at=10_000))
    assert found.context.consumer_cores < 0.1


# Failures


def failing(kind, when):
    answer = Failure(kind=kind, phase="batches", message="no")
    return lambda config: answer if when(config) else None


@pytest.mark.parametrize(
    ("kind", "search"),
    [("user_exception", "auto"), ("oom_killed", "auto"), ("deadline", "auto"), ("crashed", "auto"), ("crashed", "tpe")],
)
def test_failures_do_not_end_the_study(kind, search):
    # GIVEN a machine on which more than two workers fail
    machine = SimulatedMachine(step_s=0.001, fails=failing(kind, lambda config: config.num_workers > 2))
    found, _, _ = run_on(machine, search=search)
    # THEN the best of the others is found
    assert any(trial.failure for trial in found.trials)
    assert found.finals.winner.num_workers == 2


@pytest.mark.parametrize("seed", seeds(6))
def test_a_step_that_binds_gets_few_workers_however_noisy_the_machine(seed):
    # GIVEN a step that two workers keep busy, 16 cores, and bursts that scatter by 6 %
    machine = SimulatedMachine(cores=16, cpu_s=0.02, step_s=0.015, service_cv=0.05, noise_sd=0.06)
    # WHEN it is searched
    found, _, _ = run_on(machine, own=None, seed=seed)
    # THEN nobody gets many workers for a lucky burst
    assert 1 < found.finals.winner.num_workers <= 5


@pytest.mark.parametrize("kind", ["oom_killed", "shared_memory", "descriptors"])
def test_the_search_stops_growing_after_failures_for_lack_of_resources(kind):
    # GIVEN a machine with room for three workers out of many
    machine = SimulatedMachine(cores=16, step_s=0.0005, fails=failing(kind, lambda config: config.num_workers > 3))
    found, probe, _ = run_on(machine, search="random", budget_s=120)
    # THEN each failure is of fewer workers than the one before
    fatal = [config.num_workers for config in probe.bursts if config.num_workers > 3]
    assert fatal == sorted(set(fatal), reverse=True)
    assert any(trial.failure and trial.failure.kind == "infeasible" for trial in found.trials)


class Hanging(SimulatedProbe):
    """Hangs with more workers than are safe."""

    safe = 0

    def burst(self, config, plan):
        if config.num_workers <= self.safe:
            return super().burst(config, plan)
        self._clock.advance(plan.deadline_s)
        return Failure(kind="deadline", phase="batches", message="hangs")


@pytest.mark.parametrize("kind", ["oom_killed", "deadline"])
@pytest.mark.parametrize(("cores", "own", "safe"), [(2, None, 2), (2, 8, 3), (16, None, 2), (16, 8, 1)])
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


def test_no_round_waits_for_a_hang_that_was_to_be_expected():
    # GIVEN workers of which more than two hang, and a budget that one hang all but spends
    probe = Hanging(SimulatedMachine(cores=2, cpu_s=0.01, wait_s=0.02, step_s=0.001), FakeClock())
    probe.safe = 2
    # WHEN it is searched THEN what was never seen to work does not race, and the most that did is the fastest
    found, _, clock = run_on(probe.machine, own=None, probe=probe, budget_s=25)
    assert found.finals is None
    assert found.fastest().config.num_workers == 2
    assert clock() < 25


def test_workers_are_tried_first_where_a_fetch_takes_seconds():
    machine = SimulatedMachine(cores=4, cpu_s=0.1, wait_s=3.0)
    found, _, _ = run_on(machine, own=None, job={"first_fetch_s": 3.1, "first_batch_s": 3.1})
    # THEN there was time for some trials, and the one that tells most is among them
    assert found.trials[0].config.num_workers == 4
    assert all(trial.measurement for trial in found.trials)


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


def test_rounds_for_which_there_is_no_time_are_not_begun():
    machine = SimulatedMachine(cores=2, cpu_s=0.1, wait_s=3.0)
    few = Space(max_workers=8)
    found, _, clock = run_on(
        machine, own=None, space=few, budget_s=25.0, job={"first_fetch_s": 3.1, "first_batch_s": 3.1}
    )
    assert found.fastest() is not None
    assert clock() <= 1.1 * 25


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


@pytest.mark.parametrize("search", ["auto", "tpe", "random", "grid"])
def test_where_everything_fails_nothing_is_found(search):
    machine = SimulatedMachine(fails=failing("user_exception", lambda config: True))
    found, _, clock = run_on(machine, search=search)
    assert found.fastest() is None
    assert found.finals is None
    assert {trial.failure.kind for trial in found.trials} <= {"user_exception", "infeasible"}
    assert clock() <= 62


def test_a_baseline_that_fails_is_no_obstacle():
    machine = SimulatedMachine(step_s=0.001, fails=failing("user_exception", lambda config: config == OWN))
    found, _, _ = run_on(machine)
    assert found.finals.winner != OWN
    assert found.finals.speedup is None


# Disturbed bursts


def test_bursts_too_short_for_an_interval_are_believed_all_the_same():
    # GIVEN scouts, and bursts of 4 workers at half the rate that the scouts expect, each of too few batches to know its error
    probe = SimulatedProbe(replace(FAST_STEP, cores=8), FakeClock())
    space, few = space_of(probe.machine), LoaderConfig(num_workers=4, prefetch_factor=2)
    design = [(config, probe.burst(config, BurstPlan())) for config in initial_design(space, usable_cores=8)]
    usual = probe.burst(few, BurstPlan())
    rate = usual.samples_per_s.value / 2
    slow = replace(usual, samples_per_s=Interval(value=rate, low=rate / 1e5, high=rate * 1e5, count=5))
    trials = [
        Trial(number=number, config=config, role="search", measurement=burst)
        for number, (config, burst) in enumerate([*design, *[(few, slow)] * 4])
    ]
    # WHEN it is learnt from them
    known = believed(space, trials)
    # THEN they pull the belief most of the way to what they say
    expected = math.exp(known.mean[known.configs.index(few)])
    assert expected < 1.4 * rate


def test_bursts_beside_neighbours_say_less():
    # GIVEN scouts during which processes of others took a quarter of the cores, or none
    probe = SimulatedProbe(replace(FAST_STEP, cores=8), FakeClock())
    space = space_of(probe.machine)
    bursts = [(config, probe.burst(config, BurstPlan())) for config in initial_design(space, usable_cores=8)]
    most = bursts[-1][0]

    def sd_beside(foreign):
        seen = [(config, replace(burst, foreign_cpu_share=foreign)) for config, burst in bursts]
        trials = [
            Trial(number=i, config=each, role="search", measurement=burst) for i, (each, burst) in enumerate(seen)
        ]
        known = believed(space, trials)
        return known.sd()[known.configs.index(most)]

    # THEN with neighbours less is known of what was measured; where nobody counted them as much as if there were none
    assert sd_beside(0.25) > 1.5 * sd_beside(0.0)
    assert sd_beside(None) == sd_beside(0.0)


# Interruptions


def test_an_interruption_at_any_moment_keeps_the_trials():
    # GIVEN how many calls a whole search makes, and its trials
    machine = SimulatedMachine(step_s=0.005)
    whole = Interrupting(SimulatedProbe(machine, FakeClock()), at=10_000)
    complete, _, _ = run_on(machine, probe=whole, max_trials=4)
    calls, kept = 10_000 - whole.left, 0
    # WHEN it is interrupted at each of them
    for at in range(calls):
        found, _, _ = run_on(machine, probe=Interrupting(SimulatedProbe(machine, FakeClock()), at=at), max_trials=4)
        # THEN every trial before it is kept
        assert found.interrupted
        assert found.stop_reason is StopReason.INTERRUPTED
        assert found.finals is None
        assert found.bursts == at + 1
        assert [trial.config for trial in found.trials] == [
            trial.config for trial in complete.trials[: len(found.trials)]
        ]
        assert len(found.trials) >= kept
        kept = len(found.trials)
    assert kept == len(complete.trials)


def test_an_interrupted_trial_is_not_left_running():
    machine = SimulatedMachine()
    found, _, _ = run_on(machine, probe=Interrupting(SimulatedProbe(machine, FakeClock()), at=3))
    assert all(frozen.state.is_finished() for frozen in found.study.get_trials())


def test_an_error_of_the_probe_itself_is_no_result():
    class Broken(Interrupting):
        def burst(self, config, plan):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_on(FAST_STEP, probe=Broken(SimulatedProbe(FAST_STEP, FakeClock()), at=99))


# How good the choice is


def machine_number(number):
    """One of many different machines and workloads."""
    rng = random.Random(number)
    waits = rng.random() < 0.4
    cores = rng.choice([2, 4, 8])
    on_cpu = rng.random() < 0.3
    return SimulatedMachine(
        cores=cores,
        cpu_s=rng.uniform(0.002, 0.05) * (0.3 if waits else 1.0),
        wait_s=rng.uniform(0.01, 0.06) if waits else 0.0,
        step_s=rng.choice([0.001, 0.005, 0.02]),
        step_cores=float(cores) / 2 if on_cpu else 0.0,
        service_cv=rng.uniform(0.05, 0.3),
        tail_share=rng.choice([0.0, 0.03]),
        alpha=rng.uniform(0.0, 0.1),
        noise_sd=rng.uniform(0.005, 0.04),
        spike_share=0.05,
    )


@pytest.mark.acceptance
def test_the_choice_is_near_the_best_on_many_machines():
    # GIVEN twenty machines that differ in cores, step, storage, contention and noise
    regrets = []
    for number in range(20):
        machine = machine_number(number)
        space = space_of(machine, prefetch_factors=(1, 2, 4))
        # WHEN each is searched with noise
        found, probe, _ = run_on(machine, own=None, space=space, seed=number)
        # THEN what was chosen is compared with the truth about a good part of the space
        rivals = {found.finals.winner, *(t.config for t in found.trials), *space.configs()[::3]}
        truths = {config: probe.truth(config, batches=300) for config in rivals}
        regrets.append(1 - truths[found.finals.winner] / max(truths.values()))
    assert statistics.median(regrets) < 0.04
    assert sorted(regrets)[-3] < 0.15
