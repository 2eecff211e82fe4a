"""What is chosen, when a choice is called a guess, and what has to be known of it: on simulated machines."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune_loader.diagnosis import Caution, Ended, Source, Undecided
from autotune_loader.diagnosis.judge import source_of
from autotune_loader.search.belief import Belief
from autotune_loader.search.space import Context, Space
from autotune_loader.tuning.assemble import assembled, choice_of
from autotune_loader.values import Failure, Interval, LoaderConfig, Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_trials, with_workers
from tests.support.tuned import simulated_result, simulated_run, simulated_search

OWN, TWO = LoaderConfig(), with_workers(2)
SAFE, NO_TIME, WORTHLESS = Ended.SAFE, Ended.BUDGET, Ended.NOT_WORTH_IT
SHAPE = replace(
    simulated_trials(SimulatedMachine(), TWO)[0].measurement, traces=(), samples=0, step_s=0.0, service_s=0.0
)


def a_search(rounds, ended, *, searched=(1.0, 1.0), foreign=0.0):
    """A search whose bursts gave the user's own configuration and another one these rates; it knows nothing else."""
    trials = []
    for number, rates in [(None, searched), *enumerate(rounds)]:
        for config, rate in zip((OWN, TWO), rates, strict=True):
            told = Interval(value=rate or 0.0, low=rate or 0.0, high=rate or 0.0, count=9)
            measured = replace(SHAPE, samples_per_s=told, foreign_cpu_share=foreign)
            trials += [Trial.of(len(trials), config, measured, round=number)] if rate else []
    belief = Belief(Space(max_workers=0, also=(TWO,)), Context(usable_cores=2), trials)
    return SimpleNamespace(trials=trials, belief=belief, run=SimpleNamespace(tolerance=0.02, baseline=OWN), ended=ended)


FASTER, ALIKE = [(100.0, 200.0), (100.0, 190.0)], [(100.0, 110.0), (100.0, 90.0)]


@pytest.mark.parametrize(
    ("search", "why", "best"),
    [
        (a_search(FASTER, SAFE), None, TWO),
        (a_search(ALIKE, SAFE), None, OWN),
        # sure, and one trial of something else says otherwise
        (a_search([(100.0, 60.0), (100.0, 60.0)], SAFE, searched=(None, 150.0)), Undecided.TOO_NOISY, OWN),
        # undecided, and it is almost certainly faster
        (a_search(FASTER, NO_TIME, foreign=0.5), Undecided.BUSY, TWO),
        (a_search(FASTER[:1], NO_TIME, searched=(100.0, 200.0)), Undecided.FEW_ROUNDS, TWO),
        (a_search([], NO_TIME, searched=(100.0, 400.0)), Undecided.NO_ROUNDS, TWO),
        # undecided, and it may not be: the user's own
        (a_search(ALIKE, NO_TIME), Undecided.CLOSE, OWN),
        (a_search([(100.0, 180.0), (100.0, 40.0)], NO_TIME, searched=(None, 300.0), foreign=0.5), Undecided.BUSY, OWN),
        (a_search(ALIKE, WORTHLESS), Undecided.TOO_NOISY, OWN),
        (a_search(ALIKE, NO_TIME, foreign=0.5), Undecided.BUSY, OWN),
        (a_search([(100.0, 101.0)], NO_TIME, searched=(100.0, 99.0)), Undecided.FEW_ROUNDS, OWN),
        (a_search([], NO_TIME, searched=(100.0, 101.0)), Undecided.NO_ROUNDS, OWN),
        (a_search([], NO_TIME, searched=(100.0, None)), Undecided.ONE_TRIED, OWN),
        # interrupted: the best so far, and nothing that never ran, whatever is believed of it
        (a_search([], Ended.INTERRUPTED, searched=(100.0, 400.0)), None, TWO),
        (a_search([], Ended.INTERRUPTED, searched=(100.0, None)), None, OWN),
    ],
)
def test_a_guess_is_the_users_own_unless_something_is_almost_certainly_faster(search, why, best):
    chosen, found = choice_of(search)
    assert (chosen, found and found.kind) == (best, why and why.kind)


def test_what_is_told_of_the_best_is_of_its_rounds_alone():
    found = simulated_result(SimulatedMachine(step_s=0.005), own=with_workers(1), budget_s=20.0)
    rates = found.rates_of(found.best)
    assert found.status == "complete"
    assert len(rates) >= 2
    assert min(rates.values()) <= found.rate.value <= max(rates.values())
    assert found.speedup.low < found.rate.value / found.baseline_rate.value < found.speedup.high
    assert None not in (found.ceiling, found.tuned_at)
    assert found.step_s == pytest.approx(0.005, rel=0.2)


def test_when_every_burst_fails_the_defaults_are_given_with_the_error():
    broken = Failure(kind="user_exception", phase="batches", message="no such file")
    found = simulated_result(SimulatedMachine(fails=lambda config: broken))
    assert (found.status, found.best, found.rate) == ("fallback", LoaderConfig(), None)
    assert Ended.FALLBACK.said_by(found.ended)
    assert any(Caution.FAILED.said_by(each) and "no such file" in each.sentence for each in found.warnings)


@pytest.mark.parametrize(("epoch_batches", "told"), [(20, True), (10_000, False)])
def test_a_choice_by_whole_epochs_says_so(epoch_batches, told):
    found = simulated_result(SimulatedMachine(worker_start_s=0.2), epoch_batches=epoch_batches)
    assert any(Caution.EPOCH_STARTS.said_by(each) for each in found.warnings) == told


class PerBatch(SimulatedProbe):
    """A step that takes as long for every batch; samples cost the workers the same."""

    def burst(self, config, plan):
        size = config.batch_size or 32
        self.machine = replace(self.machine, batch_size=size, cpu_s=0.005 * size / 32)
        return super().burst(replace(config, batch_size=None), plan)


def test_a_batch_size_is_chosen_where_it_gains_and_was_allowed():
    machine, clock = SimulatedMachine(cpu_s=0.005), FakeClock()
    run = simulated_run(machine, Space(max_workers=4, batch_sizes=(None, 64, 128, 16)), epoch_batches=10_000)
    found = assembled(simulated_search(PerBatch(machine, clock), run, clock), 1.0)
    assert found.best.batch_size == found.batch_size
    assert found.batch_size in {64, 128}
    assert any(Caution.BATCH_SIZE.said_by(each) for each in found.warnings)


@pytest.mark.parametrize(
    ("sample", "samples", "fits", "told"),
    [
        (None, 10, True, None),
        (0.0, 10, True, Source.NOT_STORAGE()),
        (1e5, None, True, Source.STORAGE(sample=1e5)),
        (1e5, 10, None, Source.STORAGE(sample=1e5)),
        (1e5, 10, True, Source.STORAGE_AT_FIRST(sample=1e5, data=10**6)),
        (1e5, 10, False, Source.STORAGE_ALWAYS(sample=1e5, data=10**6, memory=1 << 30)),
    ],
)
def test_where_samples_came_from_is_told_and_where_training_will_have_them_from(sample, samples, fits, told):
    machine = SimpleNamespace(memory=SimpleNamespace(total_bytes=1 << 30), holds=lambda size: fits)
    measured = SimpleNamespace(read_bytes_per_sample=sample)
    data = SimpleNamespace(samples_per_epoch=lambda: samples)
    assert source_of(measured, data, machine) == told
