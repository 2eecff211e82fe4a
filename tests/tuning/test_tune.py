"""`tune()` and `compare()` from call to file or answer, on simulated machines."""

from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import optuna
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import LoaderConfig, TuningResult, compare, load_config, tune
from autotune_loader.diagnosis import Caution
from autotune_loader.diagnosis.tables import answer
from autotune_loader.tuning.bursting import Budget
from autotune_loader.tuning.compare import LEAST_ROUNDS, paired_rounds, working
from autotune_loader.tuning.study import CHOSEN
from autotune_loader.values import Failure, Interval, Trial, WorkloadError
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    on_simulated_machines,
    simulated_trials,
)

ROWS = TensorDataset(torch.zeros(100_000, 3), torch.zeros(100_000, dtype=torch.long))
MACHINE = SimulatedMachine(batch_size=8, step_s=0.005)


def loader(**parts):
    return DataLoader(ROWS, **{"batch_size": 8, **parts})


def tuned(monkeypatch, data=None, probe=SimulatedProbe, **given):
    on_simulated_machines(monkeypatch, lambda workload: MACHINE, probe)
    return tune(loader() if data is None else data, torch.nn.Linear(3, 2), progress=False, **given)


class Own(DataLoader):
    def __iter__(self):
        pytest.fail("the user's own loader must never be iterated")


def test_a_loader_is_the_baseline_and_result_and_file_make_the_same_one_anew(tmp_path, monkeypatch):
    own, path = Own(ROWS, batch_size=8, num_workers=1, prefetch_factor=3), tmp_path / "loader.json"
    result = tuned(monkeypatch, own, output=path)
    # THEN it is what the choice is compared with
    assert (result.baseline.num_workers, result.baseline.prefetch_factor) == (1, 3)
    assert (result.trials[0].config, result.batch_size) == (result.baseline, 8)
    # AND what is written is what was measured: the best, exactly as it is told, ran in the rounds
    assert result.best in {trial.config for trial in result.trials if trial.round is not None}
    assert (
        load_config(path)
        == LoaderConfig.from_loader(result.make_loader(ROWS, shuffle=True))
        == result.best
    )
    written = TuningResult.load(path)
    assert (written.best, written.status, len(written.trials)) == (
        result.best,
        result.status,
        len(result.trials),
    )
    # AND only a loader that shuffles is given back shuffled
    assert (result.shuffle, tuned(monkeypatch, ROWS, batch_size=8).shuffle) == (False, False)
    assert tuned(monkeypatch, loader(shuffle=True)).shuffle


def test_what_a_file_that_fits_has_found_is_tried_first_and_another_jobs_is_not(
    tmp_path, monkeypatch
):
    path, odd = tmp_path / "loader.json", LoaderConfig(num_workers=7, prefetch_factor=5)
    earlier = tuned(monkeypatch, output=path)

    def tried(**changes):
        replace(earlier, best=odd, **changes).save(path)
        return [
            trial.config for trial in tuned(monkeypatch, output=path).trials if trial.round is None
        ]

    assert tried()[0] == odd
    assert odd not in tried(batch_size=16) + tried(machine=None)
    # AND what is no result is written over
    path.write_text("{}")
    assert tuned(monkeypatch, output=path).best == TuningResult.load(path).best


@pytest.mark.parametrize(
    "given", [None, optuna.samplers.RandomSampler(seed=0)], ids=["the twin", "another sampler"]
)
def test_the_study_of_the_user_is_gone_on_with_and_told_the_choice(monkeypatch, given):
    study, params = (
        optuna.create_study(direction="maximize"),
        {"num_workers": 5, "prefetch_factor": 2},
    )
    sampler = study.sampler
    study.enqueue_trial(params)
    result = tuned(monkeypatch, study=study, sampler=given)
    # AND its sampler is the user's again
    assert (result.study, study.sampler, study.trials[0].params) == (study, sampler, params)
    assert LoaderConfig.from_dict(study.user_attrs[CHOSEN]) == result.best


def ending_by(error):
    class Ending(SimulatedProbe):
        def burst(self, config, plan):
            if len(self.bursts) == 3:
                raise error
            return super().burst(config, plan)

    return Ending


def test_ctrl_c_keeps_what_was_measured_and_a_sample_that_raises_ends_the_run_and_writes_nothing(
    tmp_path, monkeypatch
):
    path, study = tmp_path / "loader.json", optuna.create_study(direction="maximize")
    path.write_text("{}")
    with pytest.raises(WorkloadError, match="sample 40 raises ValueError: no"):
        tuned(
            monkeypatch,
            probe=ending_by(WorkloadError("sample 40 raises ValueError: no")),
            output=path,
            study=study,
        )
    assert path.read_text() == "{}"
    assert all(each.state.is_finished() for each in study.trials)
    result = tuned(monkeypatch, probe=ending_by(KeyboardInterrupt()), output=path)
    assert (result.status, len(result.trials), TuningResult.load(path).status) == (
        "partial",
        3,
        "partial",
    )
    assert "interrupted" in result.report()
    # AND so does a Ctrl-C that comes while Optuna is told a trial
    tell, told = (
        optuna.study._optimize._tell_with_warning,
        Mock(side_effect=[None, None, None, KeyboardInterrupt()]),
    )
    monkeypatch.setattr(
        optuna.study._optimize,
        "_tell_with_warning",
        lambda **given: tell(**given) if told() is None else None,
    )
    result = tuned(monkeypatch)
    assert (result.status, len([each for each in result.trials if each.measurement])) == (
        "partial",
        3,
    )


def test_an_output_that_cannot_be_written_is_refused_and_a_disk_that_fills_up_costs_a_warning(
    tmp_path, monkeypatch
):
    (tmp_path / "a-file").touch()
    for place in (tmp_path, tmp_path / "a-file" / "loader.json"):
        with pytest.raises(
            ValueError, match=r"cannot be written .*output='loader.json' would work"
        ):
            tune(ROWS, batch_size=8, output=place)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]
    # WHERE nothing can be written into the folder that the job is in THEN another one is proposed
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=r"output='/.+/loader.json' would work"):
        tune(ROWS, batch_size=8, output="loader.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        TuningResult, "save", Mock(side_effect=OSError(28, "No space left on device"))
    )
    result = tuned(monkeypatch, output=tmp_path / "x.json")
    assert Caution.NOT_WRITTEN.said_by(result.warnings[-1])
    assert result.rate is not None


# compare()

FAST, SLOW = (
    SimulatedMachine(cpu_s=0.02, noise_sd=0.02),
    SimulatedMachine(cpu_s=0.04, noise_sd=0.02),
)
BROKEN = SimulatedMachine(
    fails=lambda config: Failure(kind="user_exception", phase="batches", message="no such file")
)
SAMPLE_RAISES = SimulatedMachine(
    fails=Mock(side_effect=WorkloadError("sample 3 raises KeyError: 'label'"))
)
AT_ONCE = "the first batch failed"
SHAPE = simulated_trials(FAST, LoaderConfig())[0].measurement


def compared(monkeypatch, budget=30, probe_on=SimulatedProbe, length=10**6, **machines):
    """One worker on each machine; a text is what the first batch of a side raises."""
    sizes = {name: getattr(machine, "batch_size", 32) for name, machine in machines.items()}
    sides = {name: DataLoader([0] * length, size, num_workers=1) for name, size in sizes.items()}
    machine_of = {id(sides[name].dataset): machine for name, machine in machines.items()}
    on_simulated_machines(
        monkeypatch, lambda workload: machine_of[id(workload.data.dataset)], probe_on
    )
    return compare(sides, train_step=0.001, progress=False, budget=budget)


def test_the_faster_side_is_told_with_its_interval_and_what_limits_it(monkeypatch):
    found = compared(monkeypatch, now=SLOW, cached=FAST)
    assert found.ratios["cached"].low < 2 < found.ratios["cached"].high < 3
    assert [each.rates.keys() for each in found.rounds[:2]] == [{"now", "cached"}] * 2
    assert found["cached"].bottleneck.kind == "cpu"
    assert "cached is" in str(found)
    # AND it is decided at once
    assert len(found.rounds) == LEAST_ROUNDS
    # AND the next takes the place of a first one that fails
    found = compared(monkeypatch, broken=AT_ONCE, now=SLOW, cached=FAST)
    assert found.ratios.keys() == {"cached"}
    assert "as fast as now in" in " ".join(found.report().split())


@pytest.mark.parametrize(
    ("factor", "noise", "rows"),
    [
        (1.1, 0.03, {"faster"}),
        (1 / 1.1, 0.03, {"slower"}),
        (1.0, 0.03, {"equal", "not_shown"}),
        (1.0, 0.003, {"equal"}),
    ],
)
def test_ten_percent_are_shown_in_30_seconds_and_equal_sides_are_never_told_apart(
    monkeypatch, factor, noise, rows
):
    now = SimulatedMachine(cpu_s=0.04, noise_sd=noise)
    found = compared(monkeypatch, now=now, other=replace(now, cpu_s=now.cpu_s / factor))
    assert answer("other", found.ratios["other"], "now").kind in rows
    assert found.seconds <= 30.0 + 1.0


def paired(outcomes, budget_s=30.0, burst_s=1.0):
    """Rounds of sides with these outcomes, a rate or a kind of failure for each round, the last one again and again."""
    clock, begun = FakeClock(), []
    trials = {name: [Trial.of(0, LoaderConfig(), SHAPE, seconds=burst_s)] for name in outcomes}

    def burst(name, number):
        begun.append(name)
        clock.advance(burst_s)
        seen = outcomes[name][min(number, len(outcomes[name]) - 1)]
        if isinstance(seen, str):
            found = Failure(kind=seen, phase="batches", message="no")
        else:
            found = replace(SHAPE, samples_per_s=Interval(value=seen, low=seen, high=seen, count=9))
        trials[name].append(Trial.of(0, LoaderConfig(), found, round=number, seconds=burst_s))

    for _ in paired_rounds(trials, burst, Budget(budget_s, clock)):
        assert clock() <= budget_s
    return trials, begun


@pytest.mark.parametrize(
    ("outcomes", "works", "runs"),
    [
        ({"a": [100.0], "b": [200.0]}, "ab", {"a": 4, "b": 4}),
        ({"a": [100.0], "b": ["crashed", 200.0]}, "ab", {"a": 5, "b": 5}),  # once is chance
        ({"a": [100.0], "b": [200.0, "crashed"]}, "a", {"a": 4, "b": 3}),
        ({"a": [100.0], "b": ["deadline"], "c": [300.0]}, "ac", {"a": 4, "b": 1, "c": 4}),
        ({"a": [100.0, "deadline"], "b": [200.0], "c": [300.0]}, "bc", {"a": 2, "b": 4, "c": 4}),
        (
            {"a": [100.0], "b": [200.0], "c": [100.0, 104.0, 97.0, 101.0] * 9},
            "abc",
            {"a": 13, "b": 4, "c": 13},
        ),
        ({"a": ["crashed"], "b": ["crashed"]}, "", {"a": 2, "b": 2}),
    ],
)
def test_rounds_end_once_all_is_decided_and_who_fails_twice_or_hangs_once_is_out(
    outcomes, works, runs
):
    trials, begun = paired(outcomes)
    assert "".join(working(trials)) == works
    assert Counter(begun) == runs


def test_a_round_that_does_not_fit_is_not_begun_and_each_of_two_is_first_as_often():
    _, begun = paired({"a": [100.0, 130.0] * 9, "b": [130.0, 100.0] * 9}, budget_s=9.0)
    assert "".join(begun) == "abbaabba"


FAILING = {
    "in a burst": {"broken": BROKEN, "works": FAST},
    "by a sample": {"works": FAST, "broken": SAMPLE_RAISES},
    "at once": {"works": FAST, "broken": AT_ONCE},
    "the first at once": {"broken": AT_ONCE, "works": FAST},
}


@pytest.mark.parametrize("sides", FAILING.values(), ids=FAILING)
def test_a_side_that_fails_is_an_answer(monkeypatch, sides):
    found = compared(monkeypatch, **sides)
    assert found["broken"].error is not None
    assert "broken failed: " in found.report()
    assert "Only works worked." in found.report()
    assert found["works"].measurement is not None
    assert found.ratios == compared(monkeypatch, one=BROKEN, other=AT_ONCE).rates == {}


class ShortEnds(SimulatedProbe):
    """On the faster machine a burst has the last batch of an epoch, which is shorter."""

    def burst(self, config, plan):
        outcome = super().burst(config, plan)
        return replace(outcome, batch_size=30.0) if self.machine == FAST else outcome


def test_sides_of_different_batch_sizes_are_compared_by_samples_and_that_is_said(monkeypatch):
    small, large = SimulatedMachine(batch_size=16, cpu_s=0.02), SimulatedMachine(batch_size=32)
    found = compared(monkeypatch, 10, small=small, large=large)
    assert found.ratios["large"].value == pytest.approx(1.0, abs=0.1)
    assert Caution.BATCH_SIZES_DIFFER.said_by(found.notes[0])
    assert "(small 16, large 32)" in found.report()
    # AND the last batch of an epoch, which is smaller, makes none differ
    found = compared(monkeypatch, 10, ShortEnds, now=FAST, then=SLOW)
    assert found["now"].measurement.batch_size < 0.95 * found["then"].measurement.batch_size
    assert found.notes == ()


WAITS = replace(SLOW, cpu_s=0.01, wait_s=0.03)
PLACES = {
    # machines, bytes that the second side reads from a disk, and samples: whether rounds read the same, and a note
    "in memory": ([SLOW, FAST], 0, 10**6, True, False),
    "in memory, and few": ([SLOW, FAST], 0, 64, True, False),
    "one from a disk": ([SLOW, FAST], 4096, 10**6, False, False),
    "one from a disk, and few": ([SLOW, FAST], 4096, 64, False, True),
    "what does not count": ([SLOW, WAITS], 0, 10**6, False, False),
}


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES)
def test_sides_read_the_same_in_a_round_only_where_none_reads_it_for_the_other(monkeypatch, case):
    (now, then), read_bytes, length, is_same, is_noted = case
    places = {now: [], then: []}

    class Reading(SimulatedProbe):
        def burst(self, config, plan):
            places[self.machine].append(plan.place)
            return replace(
                super().burst(config, plan), read_bytes=read_bytes if self.machine == then else 0
            )

    found = compared(monkeypatch, 10, Reading, length=length, now=now, then=then)
    rounds = range(len(found.rounds))
    assert (
        list(places.values()) == [[None, *(number if is_same else None for number in rounds)]] * 2
    )
    assert [Caution.READ_TWICE.said_by(each) for each in found.notes] == [True] * is_noted


LOADER = loader()


@pytest.mark.parametrize(
    ("sides", "error", "message"),
    [
        (LOADER, TypeError, "is not a dict of loaders by name"),
        ({"a": LOADER}, ValueError, "^sides=.* has fewer than two sides; .* would work"),
        ({"a": LOADER, 2: LOADER}, TypeError, "sides has the name 2, which is not a string"),
        ({"a": LOADER, "b": "path"}, TypeError, r"sides\['b'\]: data='path' is a path"),
        (
            {"a": LOADER, "b": (LOADER,)},
            TypeError,
            r"sides\['b'\] is a tuple of 1; \(loader, train_step\) or ",
        ),
        (
            {"a": LOADER, "b": (LOADER, "step")},
            TypeError,
            r"sides\['b'\]: train_step='step' is not callable",
        ),
    ],
)
def test_wrong_sides_are_named(sides, error, message):
    with pytest.raises(error, match=message):
        compare(sides)


def test_a_side_may_have_a_step_or_a_model_of_its_own(monkeypatch):
    model, step = torch.nn.Linear(4, 2), lambda model, batch: None

    def machine_of(workload):
        return (
            SLOW
            if workload.training.train_step is None and workload.training.model is model
            else FAST
        )

    on_simulated_machines(monkeypatch, machine_of)
    sides = {"now": LOADER, "step": (LOADER, step), "model": (Own([0] * 9), torch.nn.Linear(4, 2))}
    found = compare(sides, model, progress=False)
    assert set(found.ratios) == {"step", "model"}
    assert "model: Own has its own __iter__, which the trials do not run" in found.report()
    assert all(ratio.value > 1.3 for ratio in found.ratios.values())
