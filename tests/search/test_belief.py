"""What is believed of a job from its bursts, and what follows for choice and next burst."""

import math
from dataclasses import replace

import numpy as np
import pytest

from autotune_loader.search.belief import CERTAIN, Belief, starting_s
from autotune_loader.search.draws import (
    PATHS,
    Draws,
    Sufficient,
    choose,
    equally_fast,
    sufficient,
    with_sufficiency,
)
from autotune_loader.search.observation import Observation
from autotune_loader.search.space import BatchCost, Context, Limits, Space
from autotune_loader.values import Failure, Interval, Trial
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_trials,
    with_workers,
)

BARE = {"service_s": 0.0, "step_s": 0.0, "batch_size": 8.0, "samples": 90, "traces": ()}
MACHINE = SimulatedMachine(cores=4, cpu_s=0.02, step_s=0.001, noise_sd=0.02)
CONTEXT, PINS = Context(usable_cores=4, step_s=0.001), Space(pin_memory=(False, True))


def ratio(belief, one, other):
    """Mean and standard deviation of ln(rate of the one / rate of the other), as they may be."""
    rates = belief.draws.of([one.key(), other.key()]).paths
    logs = rates[:, 0] - rates[:, 1]
    return float(logs.mean()), float(logs.std())


def draws_of(means, sd):
    """Normal draws of logarithms of these means."""
    off = np.random.default_rng(0).standard_normal((PATHS, len(means)))
    return Draws(keys=tuple(range(len(means))), paths=np.array(means) + np.array(sd) * off)


@pytest.mark.parametrize(
    ("deficit", "sd", "is_equal"),
    [(0.001, 0.004, True), (0.019, 1e-4, True), (0.021, 1e-4, False), (0.015, 0.03, False)],
)
def test_equally_fast_means_within_2_percent(deficit, sd, is_equal):
    # GIVEN few workers that are so much slower than many, as surely as that
    draws = draws_of([-deficit, 0.0], sd)
    # THEN they are chosen where they are within 2% almost certainly, or as probably as the many
    assert (0 in equally_fast(draws, 0.02)) == is_equal
    assert choose(draws, [(4,), (8,)], 0.02) == (0 if is_equal else 1)


def test_the_choice_is_near_the_best():
    ran = [with_workers(count, 8) for count in (0, 1, 4, 6)]
    belief = Belief(Space(), CONTEXT, simulated_trials(MACHINE, *ran))
    choice, probe = belief.choice, SimulatedProbe(MACHINE, FakeClock())
    best = max(probe.truth(with_workers(count, 8), batches=400) for count in range(9))
    assert probe.truth(choice) >= 0.97 * best
    # THEN all answers come from the same draws
    assert belief.probability(choice) < CERTAIN
    assert belief.rival(choice) not in (None, choice)
    assert belief.predicted(choice) == pytest.approx(probe.truth(choice), rel=0.1)
    mean, sd = ratio(belief, choice, with_workers(0))
    assert mean > 2 * sd > 0


def test_where_nothing_was_measured_nothing_is_chosen():
    assert Belief(Space(), CONTEXT, []).choice is None


FAILURES = {
    "the geometric middle": ("oom_killed", 32, 2, {}, 8),
    "one, where none has worked": ("deadline", 35, 0, {}, 1),
    "none, where one has failed": ("crashed", 1, 0, {}, 0),
    "never what failed": ("oom_killed", 3, 2, {}, 2),
    "unless more have succeeded": ("oom_killed", 4, 8, {}, math.inf),
    "not for another knob": ("user_exception", 8, 0, {"pin_memory": True}, math.inf),
    "but a hang, whatever the knobs": ("deadline", 35, 0, {"pin_memory": True}, 1),
    "nor for another batch size": ("out_of_memory", 8, 0, {"batch_size": 64}, math.inf),
    "nor for arithmetic": ("infeasible", 8, 2, {}, math.inf),
    "nor for memory with a deep queue": ("oom_killed", 3, 0, {"prefetch": 5}, math.inf),
}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_a_failure_bounds_the_workers_tried(case):
    kind, failed, succeeded, knobs, most = case
    broken, space = with_workers(failed, **knobs), replace(PINS, batch_size=(None, 64))
    failure = Failure(kind=kind, phase="batches", message="no")
    trials = simulated_trials(MACHINE, with_workers(0), with_workers(succeeded, 8))
    belief = Belief(space, CONTEXT, [*trials, Trial.of(9, broken, failure)])
    assert belief.most_workers == most
    # THEN neither it nor anything beyond is proposed or chosen
    assert broken.key() not in belief.configs
    seen = {trial.config.key() for trial in belief.trials}
    assert all(config.num_workers <= most or config in seen for config in belief.configs)
    # AND once workers have failed, no more are chosen than have succeeded
    proven = max(config.num_workers for config in belief.proven)
    assert (proven == succeeded) == (most < math.inf)
    # AND a queue that took too much memory is halved at least
    if "prefetch" in knobs:
        deep = max(config.batches_in_flight for config in belief.configs if config not in seen)
        assert deep == broken.batches_in_flight / 2


def test_a_setting_that_fails_is_left_out():
    broken = Failure(kind="user_exception", phase="batches", message="cannot pin")
    trials = simulated_trials(MACHINE, with_workers(0), with_workers(2, 8))
    trials.append(Trial.of(9, with_workers(4, pin_memory=True), broken))
    belief = Belief(PINS, CONTEXT, trials)
    assert not any(config.pin_memory for config in belief.configs)
    assert max(config.num_workers for config in belief.configs) >= 4


@pytest.mark.parametrize(
    ("mib", "tail_share", "depths"),
    [(1, 0.0, {1, 2, 4, 8}), (100, 0.0, {2}), (100, 0.05, {4, 8})],
    ids=["a queue that costs nothing", "a dear one", "a dear one that bridges slow batches"],
)
def test_a_dear_queue_is_as_deep_as_needed(mib, tail_share, depths):
    machine = SimulatedMachine(
        cores=8, cpu_s=0.002, wait_s=0.04, step_s=0.01, tail_share=tail_share
    )
    limits, batch = Limits(memory_bytes=64 << 30), BatchCost(bytes=mib << 20)
    trials = simulated_trials(machine, *(with_workers(count, 2) for count in (0, 5, 7, 7)))
    space = Space(max_workers=8, batch=batch, limits=limits)
    belief = Belief(space, Context(usable_cores=8, step_s=0.01), trials)
    never_ran = [config for config in belief.configs if config.num_workers in (6, 8)]
    found = {config.prefetch_factor for config in never_ran}
    assert found <= depths
    assert len(found) == (4 if mib == 1 else 1)


def test_headroom_tells_nothing_of_unmodelled_settings():
    enough, pinned = with_workers(5), with_workers(8, pin_memory=True)
    configs = [enough, with_workers(8), replace(enough, pin_memory=True), pinned]
    space = Space(pin_memory=(False, True))
    found = sufficient(configs, [observed(enough)], [1.0] * 4, space.is_modelled)
    assert {configs[each.position] for each in found} == {enough}
    assert {configs[index] for each in found for index in each.larger} == {with_workers(8)}


def test_headroom_is_that_of_all_bursts():
    # GIVEN a burst whose fetches and steps differ, and receive the quickest; and one that pins
    ways = {"service_s": np.array([0.04, 0.06] * 2), "step_s": np.array([0.01, 0.02] * 2)}
    pinning = replace(observed(ENOUGH, batches=8, receive_s=0.002), pin_s=0.012)
    bursts = [replace(observed(ENOUGH), receive_s=np.full(4, 0.0005), **ways), pinning]
    [found] = sufficient(CONFIGS, bursts, [0.9] * 3)
    # THEN they are 1.55 and 1.5, the former known to 17%, the latter to 5%
    of_step, of_fetch = (0.005 / 0.0155) ** 2 / 4, 4 * 0.2**2 / 12
    variances = np.array([of_step + of_fetch / 4, of_fetch / 8]) + 0.02**2
    precision = (1 / variances).sum()
    assert found.log_headroom == pytest.approx((np.log([1.55, 1.5]) / variances).sum() / precision)
    assert found.headroom_sd == pytest.approx(math.hypot(precision**-0.5, 0.02))
    assert found.least_loss == pytest.approx(0.1)


@pytest.mark.parametrize(("epoch_batches", "most"), [(None, 1.5 * 4 + 4), (3, 3)])
def test_workers_beyond_use_are_no_candidates(epoch_batches, most):
    trials = simulated_trials(MACHINE, with_workers(0), with_workers(1, 8))
    belief = Belief(Space(), replace(CONTEXT, epoch_batches=epoch_batches), trials)
    assert max(config.num_workers for config in belief.configs) <= most


@pytest.mark.parametrize(
    ("keeps", "batches", "gets_workers"),
    [(False, 10, False), (True, 10, True), (False, 10_000, True)],
)
def test_workers_that_start_each_short_epoch_are_out(keeps, batches, gets_workers):
    machine = SimulatedMachine(cores=8, cpu_s=0.02, step_s=0.02, start_s=1.0)
    trials = simulated_trials(machine, with_workers(0), with_workers(2, 8), with_workers(1, 8))
    context = Context(usable_cores=8, step_s=0.02, epoch_batches=batches)
    belief = Belief(Space(max_workers=2, persistent_workers=keeps), context, trials)
    assert (belief.choice.num_workers > 0) == gets_workers
    # THEN what a burst is expected to show is the rate in the midst of an epoch
    assert belief.predicted(with_workers(2, 8)) == pytest.approx(trials[1].samples_per_s, rel=0.1)


def test_beliefs_hold_the_truth_as_often_as_told():
    beyond = []  # 1.645 standard deviations of ln(rate / rate of the choice)
    for seed in range(0, 24, 3):
        law = {"noise_sd": 0.04, "alpha": 0.02 + 0.004 * seed, "cpu_s": 0.01 * 1.1**seed}
        machine, ran = (
            replace(MACHINE, **law),
            (with_workers(0), with_workers(2, 8), with_workers(5)),
        )
        belief = Belief(Space(), CONTEXT, simulated_trials(machine, *ran, seed=seed))
        probe, choice = SimulatedProbe(machine, FakeClock()), belief.choice
        best = probe.truth(choice, batches=400)
        for config in (with_workers(1), with_workers(3, 4), with_workers(6), with_workers(8, 8)):
            mean, sd = ratio(belief, config, choice)
            truth = np.log(probe.truth(config, batches=400) / best)
            beyond.append(abs(truth - mean) > 1.645 * sd + 1e-9)
    assert np.mean(beyond) <= 0.1


def test_a_knob_is_believed_once_measured():
    # GIVEN pinning that was measured to be 10% faster beside the same without
    plain, pinned = with_workers(4, 8), with_workers(4, 8, pin_memory=True)
    trials = simulated_trials(MACHINE, with_workers(0), with_workers(1, 8), plain)
    assert abs(ratio(Belief(PINS, CONTEXT, trials), pinned, plain)[0]) < 0.01
    seen = trials[2].measurement
    rate = replace(seen.samples_per_s, value=1.1 * seen.samples_per_s.value)
    for number in range(3):
        trials.append(Trial.of(20 + 2 * number, plain, seen, round=number))
        faster = replace(seen, samples_per_s=rate)
        trials.append(Trial.of(21 + 2 * number, pinned, faster, round=number))
    after = Belief(PINS, CONTEXT, trials)
    # THEN it is believed of other numbers of workers, too
    assert ratio(after, pinned, plain)[0] > 0.06
    assert ratio(after, with_workers(3, 8, pin_memory=True), with_workers(3, 8))[0] > 0.04


KNOWN = [
    # workers, prefetch, pinned, round, samples/s
    (0, 1, False, None, 300.0), (1, 2, False, None, 410.0), (4, 4, False, None, 1050.0),
    (4, 4, True, 0, 1100.0), (2, 2, False, 0, 800.0), (2, 2, False, 1, 850.0),
    (4, 4, True, 1, 1150.0), (6, 8, False, None, 900.0),
]  # fmt: skip
BELIEVED = {
    # workers, prefetch, pinned: samples/s, loss and probability of being near the best, and workers
    # and prefetch of its rival, which are pinned; untraced
    (0, 1, False): ((299.958, 0.74967, 0.0000, (3, 8)), (300.760, 0.82158, 0.0000, (4, 1))),
    (1, 8, False): ((428.911, 0.64472, 0.0000, (3, 8)), (487.268, 0.68184, 0.0010, (4, 1))),
    (3, 2, False): ((1022.151, 0.16506, 0.0186, (3, 8)), (1079.529, 0.37907, 0.0029, (4, 1))),
    (4, 4, True): ((1124.110, 0.08594, 0.2578, (3, 8)), (1116.889, 0.35454, 0.0225, (4, 1))),
    (5, 1, False): ((931.813, 0.23970, 0.0010, (3, 8)), (1124.824, 0.34244, 0.0176, (3, 8))),
    (6, 8, True): ((1073.925, 0.12546, 0.1084, (3, 8)), (951.261, 0.44819, 0.0000, (4, 1))),
}


@pytest.mark.parametrize("is_traced", [True, False])
def test_beliefs_are_those_that_studies_judged(is_traced):
    # GIVEN arithmetic that `studies/regret` has measured THEN nobody changes it unawares
    shape = replace(simulated_trials(MACHINE, with_workers(0))[0].measurement, **BARE)
    trials = []
    for workers, prefetch, pinned, round_, rate in KNOWN:
        interval = Interval(value=rate, low=0.97 * rate, high=1.03 * rate, count=90)
        config = with_workers(workers, prefetch, pin_memory=pinned)
        burst = replace(shape, samples_per_s=interval)
        trials.append(Trial.of(len(trials), config, burst, round=round_))
    context = replace(CONTEXT, epoch_batches=500, start_s=2.0)
    stages = [observed(with_workers(count), step_s=0.009) for count in (0, 1, 4)]
    belief = Belief(PINS, context, trials, observations=stages if is_traced else None)
    assert belief.choice == with_workers(*((3, 8) if is_traced else (4, 1)), pin_memory=True)
    for (workers, prefetch, pinned), (traced, untraced) in BELIEVED.items():
        config = with_workers(workers, prefetch, pin_memory=pinned)
        rate, loss, probability, rival = traced if is_traced else untraced
        assert belief.predicted(config) == pytest.approx(rate, rel=1e-4)
        assert belief.loss(config) == pytest.approx(loss, abs=1e-4)
        assert belief.probability(config) == pytest.approx(probability, abs=3 / PATHS)
        assert belief.rival(config) == with_workers(*rival, pin_memory=True)


# Workers that keep the loop busy: more of them are not faster, however lucky their burst was

CONFIGS = TOO_FEW, ENOUGH, MANY = tuple(with_workers(count, 8) for count in (2, 5, 16))


def observed(config, *, batches=200, slow=0, faster=1.0, receive_s=0.0005, step_s=0.01):
    """A burst in which a worker takes 40 ms a batch, `slow` of them ten times as long."""
    service = np.full(batches, 0.04) / faster
    service[:slow] *= 10
    return Observation(
        num_workers=config.num_workers, service_s=service, cpu_s=service, at_work=1.0,
        receive_s=np.full(batches, receive_s) / faster, step_s=np.full(batches, step_s) / faster,
        batch_size=8.0, batches_per_s=12.5,
    )  # fmt: skip


ALL = [observed(config) for config in CONFIGS]


def draws_with(bursts, many=110.0, *, sd=0.05, use=1.0):
    """Draws around 50, 100 and so many samples/s, with what the bursts show."""
    before = draws_of(np.log([50.0, 100.0, many]).tolist(), sd)
    return replace(
        before, paths=with_sufficiency(before.paths, sufficient(CONFIGS, bursts, (0.5, use, 1.0)))
    )


@pytest.mark.parametrize(
    ("draws", "chosen"),
    [(draws_with(ALL), ENOUGH), (draws_with([]), MANY), (draws_with(ALL, 130.0, sd=0.02), MANY)],
    ids=["they are enough", "nothing was seen", "rates beyond all luck refute it"],
)
def test_a_lucky_burst_does_not_beat_enough_workers(draws, chosen):
    # GIVEN 16 workers that are believed to be 10% faster than 5, which keep the loop busy
    assert CONFIGS[choose(draws, [(config.num_workers,) for config in CONFIGS], 0.02)] == chosen
    if chosen == ENOUGH:
        # THEN they are as fast in every truth that may be, so that no pair is worth its time
        assert np.all(draws.paths[:, 1] >= draws.paths[:, 2] - 1e-9)
        assert np.median(draws.paths[:, 0] - draws.paths[:, 2]) < np.log(0.6)


HIDDEN = {"step_s": 0.007, "receive_s": 0.0035}
KEEPING_UP = {
    # bursts of 5 and of 16 workers, and the share of the time in which the loop works
    "they keep up": ({}, None, 1.0, True),
    "the loop waits 8% of the time": ({}, None, 0.92, False),
    "rare slow batches elsewhere": ({"batches": 30}, {"batches": 30, "slow": 2}, 1.0, False),
    "a step that is too quick for them": ({"step_s": 0.006}, {}, 1.0, False),
    "they hide only that a batch travels": (HIDDEN, {}, 1.0, False),
    "a moment in which everything was quicker": ({}, {"faster": 1.3}, 1.0, True),
}


@pytest.mark.parametrize("case", KEEPING_UP.values(), ids=KEEPING_UP)
def test_workers_are_enough_that_exceed_the_loop(case):
    enough, many, use, are_enough = case
    bursts = [observed(ENOUGH, **enough)] + ([] if many is None else [observed(MANY, **many)])
    paths = draws_with(bursts, use=use).paths
    # THEN 5 workers lose nothing against 16, in the mean of the truths that may be
    lost = np.maximum(1 - np.exp(paths[:, 1] - paths[:, 2]), 0.0).mean()
    assert (lost < 0.001) == are_enough


def test_enough_workers_are_not_outvoted_by_the_unknown():
    # GIVEN one worker that is enough, and the luckiest of a hundred that never ran
    noise = np.random.default_rng(0).standard_normal((PATHS, 102))
    none, one = 0.07 + 0.015 * noise[:, :1], 0.015 * noise[:, 1:2]
    paths, more = np.concatenate([none, one, 0.1 * noise[:, 2:]], axis=1), tuple(range(2, 102))
    enough = Sufficient(position=1, log_headroom=1.0, headroom_sd=0.02, larger=more)
    draws = Draws(keys=tuple(range(102)), paths=with_sufficiency(paths, [enough]))
    # THEN what is measured to be 7% faster, without workers, is chosen, and nothing is as fast
    assert choose(draws, [(count,) for count in range(102)], 0.02) == 0
    assert equally_fast(draws.of([0, 1]), 0.02) == [0]


@pytest.mark.parametrize(
    ("workers", "begun", "start_s", "seconds"),
    [
        (0, {2: 3.0}, 1.5, 0.0),
        (4, {}, 1.5, 3.0),  # as many at once as there are cores
        (2, {2: 3.0}, 1.5, 3.0),
        (32, {2: 3.0, 8: 10.0}, 1.5, 40.0),
        (4, {}, 0.0, 0.0),  # forked
    ],
)
def test_the_start_of_workers_is_scaled(workers, begun, start_s, seconds):
    trials = simulated_trials(SimulatedMachine(), *map(with_workers, begun))
    for number, (trial, took) in enumerate(zip(trials, begun.values(), strict=True)):
        first = {"first_batch_s": took + trial.measurement.service_s}
        trials[number] = replace(trial, measurement=replace(trial.measurement, **first))
    context = Context(usable_cores=2, start_s=start_s)
    assert starting_s(trials, workers, context) == pytest.approx(seconds)
    # AND one at a time where there is one core
    assert starting_s([], 4, Context(usable_cores=1, start_s=1.5)) == 6.0
