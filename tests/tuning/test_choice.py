"""What is chosen, when a choice is called a guess, and what has to be known of it: on simulated machines."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune_loader.diagnosis import Caution, Ended, Source, Undecided
from autotune_loader.search.rounds import RoundsEnd
from autotune_loader.search.space import Space
from autotune_loader.tuning.assemble import assembled, choice_of, source_of, why_undecided
from autotune_loader.values import Failure, LoaderConfig, Round
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, with_workers
from tests.support.tuned import simulated_result, simulated_run, simulated_search

OWN, TWO = LoaderConfig(), with_workers(2)
AGREE, DISAGREE, ONE = [(1.0, 2.0), (1.0, 1.5)], [(1.0, 1.1), (1.0, 0.9)], [(1.0, 9.0)]
NO_TIME, WORTHLESS = RoundsEnd.NO_TIME, RoundsEnd.NOT_WORTH_IT


def a_search(rates, ended=NO_TIME, *, loss=0, foreign=0, capped=False, searched=(1, 1), own_ran=None, why=Ended.SAFE):
    """A search whose rounds gave the user's own configuration and the winner these rates; perhaps they alone ran it."""
    sides = [{side: rate for side, rate in zip((OWN, TWO), pair, strict=True) if rate} for pair in rates]
    rounds = tuple(Round(rates=each, foreign_cpu_share=foreign) for each in sides)
    ran = zip((OWN, TWO), searched, (own_ran, None), strict=False)
    trials = [SimpleNamespace(config=c, samples_per_s=s, round=r, measurement=object()) for c, s, r in ran]
    belief = SimpleNamespace(loss=lambda config: loss, choice=TWO)
    return SimpleNamespace(
        outcome=SimpleNamespace(winner=TWO, rounds=rounds, at_ceiling=capped) if rounds else None,
        rounds=SimpleNamespace(ended=ended) if rounds else None, trials=trials, fastest=lambda: trials[-1],
        run=SimpleNamespace(tolerance=0.02, baseline=OWN), twin=SimpleNamespace(belief=lambda study: belief),
        study=None, ended=why,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("search", "why", "best"),
    [
        (a_search(AGREE, RoundsEnd.SAFE), None, TWO),
        (a_search(DISAGREE, WORTHLESS), None, TWO),
        (a_search([(1.0, 1.1)], capped=True), None, TWO),
        # undecided, and two rounds agree that something is faster
        (a_search(AGREE, loss=0.05), Undecided.CLOSE, TWO),
        (a_search(AGREE, foreign=0.5), Undecided.BUSY, TWO),
        # undecided, and they do not: the user's own
        (a_search(DISAGREE, loss=0.05), Undecided.CLOSE, OWN),
        (a_search(DISAGREE, WORTHLESS, loss=0.05), Undecided.TOO_NOISY, OWN),
        (a_search(DISAGREE, foreign=0.5), Undecided.BUSY, OWN),
        (a_search(ONE), Undecided.FEW_ROUNDS, OWN),
        (a_search(ONE, searched=(1.0, 4.0)), Undecided.FEW_ROUNDS, TWO),
        (a_search([(1.0, 0.9)], searched=(1.0, 4.0)), Undecided.FEW_ROUNDS, OWN),
        (a_search(ONE, own_ran=0), Undecided.FEW_ROUNDS, TWO),
        (a_search([(1.0, 1.1)], own_ran=0), Undecided.FEW_ROUNDS, OWN),
        (a_search([], searched=(1.0, 4.0)), Undecided.NO_ROUNDS, TWO),
        (a_search([], searched=(1.0, 1.4)), Undecided.NO_ROUNDS, OWN),
        (a_search([], searched=(1.0,)), Undecided.ONE_TRIED, OWN),
        (a_search([(None, 9.0), *ONE], loss=0.05), Undecided.CLOSE, OWN),
        # interrupted: the best so far
        (a_search([], why=Ended.INTERRUPTED), Undecided.NO_ROUNDS, TWO),
        # and nothing that never ran, whatever is believed of it
        (a_search([], searched=(1.0,), why=Ended.INTERRUPTED), Undecided.ONE_TRIED, OWN),
    ],
)
def test_a_guess_is_the_users_own_unless_two_rounds_agree(search, why, best):
    found = why_undecided(search)
    assert (found and found.kind) == (why and why.kind)
    assert choice_of(search, is_decided=found is None) == best


def test_what_is_told_of_the_best_is_of_its_rounds_alone():
    found = simulated_result(SimulatedMachine(step_s=0.005), own=with_workers(1))
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
