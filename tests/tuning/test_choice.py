"""What is chosen, when a choice is called a guess, and what has to be known of it: on simulated machines."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune_loader.diagnosis import Caution, Ended, Source, Undecided
from autotune_loader.search.rounds import RoundsEnd
from autotune_loader.tuning.assemble import assembled, choice_of, source_of, why_undecided
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.statistics import Round
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import simulated_result, simulated_run, simulated_search

ONE, TWO = LoaderConfig(), LoaderConfig(num_workers=2)
AGREE, DISAGREE = [(100.0, 200.0), (100.0, 150.0)], [(100.0, 110.0), (100.0, 90.0)]


def a_search(
    rates, *, ended=RoundsEnd.NO_TIME, tried=2, loss=0.0, foreign=0.0, searched=1.0, capped=False, because=Ended.SAFE
):
    """A search whose rounds gave the user's own configuration and the winner these rates."""
    rounds = tuple(
        Round(rates={side: rate for side, rate in ((ONE, a), (TWO, b)) if rate is not None}, foreign_cpu_share=foreign)
        for a, b in rates
    )
    trials = [
        SimpleNamespace(config=config, measurement=object(), round=None, samples_per_s=rate)
        for config, rate in ((ONE, 1.0), (TWO, searched))[:tried]
    ]
    belief = SimpleNamespace(loss=lambda config: loss, choice=TWO)
    return SimpleNamespace(
        outcome=SimpleNamespace(winner=TWO, rounds=rounds, at_ceiling=capped) if rounds else None,
        rounds=SimpleNamespace(ended=ended) if rounds else None,
        trials=trials,
        fastest=lambda: trials[-1],
        run=SimpleNamespace(tolerance=0.02, baseline=ONE),
        twin=SimpleNamespace(belief=lambda study: belief),
        study=None,
        ended=because,
    )


def own_in_rounds_alone(search):
    search.trials[0].round = 0
    return search


@pytest.mark.parametrize(
    ("search", "why", "best"),
    [
        (a_search(AGREE, ended=RoundsEnd.SAFE), None, TWO),
        (a_search(DISAGREE, ended=RoundsEnd.NOT_WORTH_IT), None, TWO),
        (a_search([(100.0, 110.0)], capped=True), None, TWO),
        # undecided, and two rounds agree that something is faster
        (a_search(AGREE, loss=0.05), Undecided.CLOSE, TWO),
        (a_search(AGREE, foreign=0.5), Undecided.BUSY, TWO),
        # undecided, and they do not: the user's own
        (a_search(DISAGREE, loss=0.05), Undecided.CLOSE, ONE),
        (a_search(DISAGREE, loss=0.05, ended=RoundsEnd.NOT_WORTH_IT), Undecided.TOO_NOISY, ONE),
        (a_search(DISAGREE, foreign=0.5), Undecided.BUSY, ONE),
        (a_search([(100.0, 900.0)]), Undecided.FEW_ROUNDS, ONE),
        (a_search([(100.0, 900.0)], searched=4.0), Undecided.FEW_ROUNDS, TWO),
        (a_search([(100.0, 90.0)], searched=4.0), Undecided.FEW_ROUNDS, ONE),
        (own_in_rounds_alone(a_search([(100.0, 900.0)])), Undecided.FEW_ROUNDS, TWO),
        (own_in_rounds_alone(a_search([(100.0, 110.0)])), Undecided.FEW_ROUNDS, ONE),
        (a_search([], searched=4.0), Undecided.NO_ROUNDS, ONE),
        (a_search([], tried=1), Undecided.ONE_TRIED, ONE),
        (a_search([(None, 900.0), (100.0, 900.0)], loss=0.05), Undecided.CLOSE, ONE),
        # interrupted: the best so far
        (a_search([], because=Ended.INTERRUPTED), Undecided.NO_ROUNDS, TWO),
        # and nothing that never ran, whatever is believed of it
        (a_search([], tried=1, because=Ended.INTERRUPTED), Undecided.ONE_TRIED, ONE),
    ],
)
def test_a_guess_is_the_users_own_unless_two_rounds_agree(search, why, best):
    found = why_undecided(search)
    assert (found and found.kind) == (why and why.kind)
    assert choice_of(search, is_decided=found is None) == best


def test_what_is_told_of_the_best_is_of_its_rounds_alone():
    found = simulated_result(SimulatedMachine(step_s=0.005), own=LoaderConfig(num_workers=1))
    rates = found.rates_of(found.best)
    assert found.status == "complete"
    assert len(rates) >= 2
    assert min(rates.values()) <= found.rate.value <= max(rates.values())
    assert found.speedup.low < found.rate.value / found.baseline_rate.value < found.speedup.high
    assert None not in (found.ceiling, found.tuned_at)
    assert found.step_s == pytest.approx(0.005, rel=0.2)


def test_when_every_burst_fails_the_defaults_are_given_with_the_distinct_errors():
    def fails(config):
        place = "a worker" if config.num_workers else "the main process"
        return Failure(kind="user_exception", phase="batches", message=f"broken in {place}")

    found = simulated_result(SimulatedMachine(fails=fails))
    assert (found.status, found.best, found.rate) == ("fallback", LoaderConfig(), None)
    assert Ended.FALLBACK.said_by(found.ended)
    assert any(Caution.FAILED.said_by(each) for each in found.warnings)


class PerBatch(SimulatedProbe):
    """A step of which all is the same for every batch."""

    def burst(self, config, plan):
        size = config.batch_size or 32
        machine, self.machine = self.machine, replace(self.machine, batch_size=size, cpu_s=0.005 * size / 32)
        try:
            return super().burst(replace(config, batch_size=None), plan)
        finally:
            self.machine = machine


def test_a_batch_size_is_chosen_where_it_gains_and_was_allowed():
    machine, clock = SimulatedMachine(batch_size=32, cpu_s=0.005, step_s=0.01), FakeClock()
    run = simulated_run(machine, epoch_batches=10_000)
    allowed = replace(run, space=replace(run.space, max_workers=4, batch_sizes=(None, 64, 128, 16)))
    found = assembled(simulated_search(PerBatch(machine, clock), allowed, clock), 1.0)
    assert found.best.batch_size == found.batch_size
    assert found.batch_size in {64, 128}
    assert any(Caution.BATCH_SIZE.said_by(each) for each in found.warnings)


@pytest.mark.parametrize(
    ("sample", "samples", "fits", "told"),
    [
        (None, 10, True, None),
        (0.0, 10, True, Source.MEMORY()),
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
