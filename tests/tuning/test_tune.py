"""`tune()` and `compare()` from call to file or answer, on simulated machines."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import optuna
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader import LoaderConfig, TuningResult, compare, load_config, tune
from autotune_loader.diagnosis import Caution
from autotune_loader.diagnosis.messages import answer
from autotune_loader.results.comparison import ratios_of
from autotune_loader.tuning.bursting import ROUND_BURST, Budget
from autotune_loader.tuning.compare import LEAST_ROUNDS, paired_rounds, working
from autotune_loader.tuning.study import CHOSEN
from autotune_loader.values import Failure, Interval, Trial, WorkloadError
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    on_simulated_machines,
    simulated_trials,
    with_workers,
)

ROWS = TensorDataset(torch.zeros(100_000, 3), torch.zeros(100_000, dtype=torch.long))
MACHINE = SimulatedMachine(batch_size=8, step_s=0.005)


def loader(**parts):
    return DataLoader(ROWS, **{"batch_size": 8, **parts})


def tuned(monkeypatch, data=None, probe=SimulatedProbe, **given):
    on_simulated_machines(monkeypatch, lambda workload: MACHINE, probe)
    given = {"budget": 8, "progress": False, **given}
    return tune(loader() if data is None else data, torch.nn.Linear(3, 2), **given)


class Own(DataLoader):
    def __iter__(self):
        pytest.fail("the user's own loader must never be iterated")


def test_what_is_written_is_what_was_measured(tmp_path, monkeypatch):
    own, path = Own(ROWS, batch_size=8, num_workers=1, prefetch_factor=3), tmp_path / "loader.json"
    result = tuned(monkeypatch, own, output=path)
    # THEN the user's own is the baseline
    assert result.baseline == with_workers(1, 3)
    assert result.trials[0].config == result.baseline
    assert result.batch_size == 8
    # AND the best, exactly as it is written, ran in the rounds, and makes the same loader anew
    assert result.best in {trial.config for trial in result.trials if trial.round is not None}
    assert load_config(path) == result.best
    assert LoaderConfig.from_loader(result.make_loader(ROWS, shuffle=True)) == result.best
    written = TuningResult.load(path)
    assert written.status == result.status
    assert len(written.trials) == len(result.trials)
    # AND only a loader that shuffles is given back shuffled
    assert not result.shuffle
    assert tuned(monkeypatch, loader(shuffle=True), budget=2).shuffle


def test_a_files_choice_is_tried_first(tmp_path, monkeypatch):
    path, odd = tmp_path / "loader.json", with_workers(7, 5)
    earlier = tuned(monkeypatch, output=path, budget=2)

    def tried(**changes):
        replace(earlier, best=odd, **changes).save(path)
        result = tuned(monkeypatch, output=path, budget=4)
        return [trial.config for trial in result.trials if trial.round is None]

    assert tried()[0] == odd
    assert odd not in tried(batch_size=16)
    assert odd not in tried(machine=None)
    # AND what is no result is written over
    path.write_text("{}")
    assert tuned(monkeypatch, output=path, budget=2).best == TuningResult.load(path).best


@pytest.mark.parametrize("sampler", [None, optuna.samplers.RandomSampler(seed=0)])
def test_the_users_study_is_continued(monkeypatch, sampler):
    study, params = (
        optuna.create_study(direction="maximize"),
        {"num_workers": 5, "prefetch_factor": 2},
    )
    before = study.sampler
    study.enqueue_trial(params)
    result = tuned(monkeypatch, study=study, sampler=sampler)
    assert result.study is study
    assert study.sampler is before
    assert study.trials[0].params == params
    assert LoaderConfig.from_dict(study.user_attrs[CHOSEN]) == result.best


def ending_by(error):
    class Ending(SimulatedProbe):
        def burst(self, config, plan):
            if len(self.bursts) == 3:
                raise error
            return super().burst(config, plan)

    return Ending


def test_a_sample_that_raises_writes_nothing(tmp_path, monkeypatch):
    path, study = tmp_path / "loader.json", optuna.create_study(direction="maximize")
    path.write_text("{}")
    probe = ending_by(WorkloadError("sample 40 raises ValueError: no"))
    with pytest.raises(WorkloadError, match="sample 40 raises ValueError: no"):
        tuned(monkeypatch, probe=probe, output=path, study=study)
    assert path.read_text() == "{}"
    assert all(trial.state.is_finished() for trial in study.trials)


@pytest.mark.parametrize("is_told", [False, True], ids=["in a burst", "while Optuna is told"])
def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, is_told):
    path, probe = tmp_path / "loader.json", ending_by(KeyboardInterrupt())
    if is_told:
        tell, answers = (
            optuna.study._optimize._tell_with_warning,
            [KeyboardInterrupt(), *[None] * 3],
        )

        def told(**given):
            if (error := answers.pop()) is not None:
                raise error
            return tell(**given)

        monkeypatch.setattr(optuna.study._optimize, "_tell_with_warning", told)
        probe = SimulatedProbe
    result = tuned(monkeypatch, probe=probe, output=path)
    assert result.status == "partial"
    assert len([each for each in result.trials if each.measurement]) == 3
    assert TuningResult.load(path).status == "partial"
    assert "interrupted" in result.report()


def test_an_unwritable_output_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "a-file").touch()
    for place in (tmp_path, tmp_path / "a-file" / "loader.json"):
        for name, works in (("output", "loader.json"), ("trace", "trace.json")):
            told = rf"^{name}=.* cannot be written .*. Try {name}='{works}'."
            with pytest.raises(ValueError, match=told):
                tune(ROWS, batch_size=8, **{name: place})
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]
    # WHERE nothing can be written into the folder that the job is in THEN another one is proposed
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=r"Try output='/.+/loader.json'"):
        tune(ROWS, batch_size=8, output="loader.json")


def test_a_disk_that_fills_up_costs_a_warning(tmp_path, monkeypatch, capsys):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(TuningResult, "save", full)
    result = tuned(monkeypatch, output=tmp_path / "x.json", budget=2, progress=True)
    # THEN what begins is told before, with the step that is timed
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith(f"starting on {result.machine.usable_cores} usable cores")
    assert re.search(rf"step: {re.escape(result.step)}; up to \d+ workers$", second)
    assert Caution.NOT_WRITTEN.said_by(result.warnings[-1])
    assert result.rate is not None


def test_a_trace_has_every_trials_batches(tmp_path, monkeypatch):
    path = tmp_path / "new" / "trace.json"
    result = tuned(monkeypatch, trace=path, budget=4)
    events = json.loads(path.read_bytes())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == [f"trial {trial.number}: {trial.config}" for trial in result.trials]
    steps = sum(each["name"] == "step" for each in events)
    assert steps == sum(len(trial.measurement.traces) for trial in result.trials)


def test_a_trace_that_fails_costs_a_warning(tmp_path, monkeypatch):
    full, path = Mock(side_effect=OSError(28, "No space left on device")), tmp_path / "loader.json"
    monkeypatch.setattr("autotune_loader.tuning.assemble.write_trace", full)
    result = tuned(monkeypatch, output=path, trace=tmp_path / "trace.json", budget=2)
    told = f"{tmp_path / 'trace.json'} was not written (No space left on device)."
    assert result.warnings[-1].sentence == told
    assert TuningResult.load(path).warnings[-1].sentence == told


# compare()

FAST = SimulatedMachine(cpu_s=0.02, noise_sd=0.02)
SLOW = replace(FAST, cpu_s=0.04)
SAYS_NO = Failure(kind="user_exception", phase="batches", message="no such file")
BROKEN = SimulatedMachine(fails=lambda config: SAYS_NO)
NO_LABEL = WorkloadError("sample 3 raises KeyError: 'label'")
SAMPLE_RAISES = SimulatedMachine(fails=Mock(side_effect=NO_LABEL))
AT_ONCE = "the first batch failed"
SHAPE = simulated_trials(FAST, LoaderConfig())[0].measurement


def compared(monkeypatch, budget=10, probe_on=SimulatedProbe, length=10**6, **machines):
    """One worker on each machine; a text is what the first batch of a side raises."""
    sizes = {name: getattr(machine, "batch_size", 32) for name, machine in machines.items()}
    sides = {name: DataLoader([0] * length, size, num_workers=1) for name, size in sizes.items()}
    machine_of = {id(sides[name].dataset): machine for name, machine in machines.items()}
    on_simulated_machines(
        monkeypatch, lambda workload: machine_of[id(workload.data.dataset)], probe_on
    )
    return compare(sides, train_step=0.001, progress=False, budget=budget)


def test_the_faster_side_is_told_with_its_cause(monkeypatch):
    found = compared(monkeypatch, now=SLOW, cached=FAST)
    assert found.ratios["cached"].low < 2 < found.ratios["cached"].high < 3
    assert found["cached"].bottleneck.kind == "cpu"
    assert "cached is" in str(found)
    # AND both ran in each round, and it is decided at once
    assert [each.rates.keys() for each in found.rounds] == [{"now", "cached"}] * LEAST_ROUNDS


def test_the_next_side_replaces_a_first_that_fails(monkeypatch):
    found = compared(monkeypatch, broken=AT_ONCE, now=SLOW, cached=FAST)
    assert found.ratios.keys() == {"cached"}
    assert "faster than now (95% CI" in " ".join(found.report().split())


def test_a_side_may_fail_once(monkeypatch):
    chance = itertools.chain([None, SAYS_NO], itertools.repeat(None))
    found = compared(monkeypatch, now=SLOW, cached=replace(FAST, fails=lambda _: next(chance)))
    assert found.ratios["cached"].count == LEAST_ROUNDS
    assert found["cached"].error is None


def in_rounds(outcome_of, names, budget_s, clock, first_s=1.0):
    """The rounds of these sides, their trials, and who ran, in order."""
    trials = {name: [Trial.of(0, LoaderConfig(), SHAPE, seconds=first_s)] for name in names}
    begun = []

    def burst(name, number):
        begun.append(name)
        since, found = clock(), outcome_of(name, number)
        found = Trial.of(0, LoaderConfig(), found, round=number, seconds=clock() - since)
        trials[name].append(found)

    rounds = list(paired_rounds(trials, burst, Budget(budget_s, clock)))
    return rounds, trials, begun


@pytest.mark.parametrize(
    ("factor", "budget_s", "rows", "least"),
    [
        (1.1, 30.0, {"faster"}, 20),
        (1.05, 60.0, {"faster"}, 19),
        (1 / 1.1, 30.0, {"slower"}, 20),
        (1.0, 30.0, {"equal", "not_shown"}, 18),
    ],
)
def test_compare_shows_5_and_10_percent_in_time(factor, budget_s, rows, least):
    now, kinds = SimulatedMachine(cpu_s=0.04, step_s=0.001, noise_sd=0.03), Counter()
    machines = {"now": now, "other": replace(now, cpu_s=now.cpu_s / factor)}
    for seed in range(20):
        clock = FakeClock()
        probes = {
            name: SimulatedProbe(machine, clock, seed=f"{name} {seed}")
            for name, machine in machines.items()
        }
        rounds, *_ = in_rounds(
            lambda name, _, probes=probes: probes[name].burst(with_workers(1), ROUND_BURST),
            machines, budget_s, clock, first_s=0.6,
        )  # fmt: skip
        assert clock() < budget_s + 1
        ratio = ratios_of(rounds, [*machines], 2)["other"]
        kinds[answer("other", ratio, "now").kind] += 1
    assert sum(kinds[row] for row in rows) >= least, kinds


def paired(outcomes, budget_s=30.0):
    """Sides with these outcomes: a rate or a kind of failure a round, the last again and again."""
    clock = FakeClock()

    def outcome_of(name, number):
        clock.advance(1.0)
        seen = outcomes[name][min(number, len(outcomes[name]) - 1)]
        if isinstance(seen, str):
            return Failure(kind=seen, phase="batches", message="no")
        return replace(SHAPE, samples_per_s=Interval(value=seen, low=seen, high=seen, count=9))

    _, trials, begun = in_rounds(outcome_of, outcomes, budget_s, clock)
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
def test_who_fails_twice_or_hangs_once_is_out(outcomes, works, runs):
    trials, begun = paired(outcomes)
    assert "".join(working(trials)) == works
    # AND who is decided beside the first runs no more
    assert Counter(begun) == runs


def test_no_round_begins_that_does_not_fit():
    _, begun = paired({"a": [100.0, 130.0] * 9, "b": [130.0, 100.0] * 9}, budget_s=9.0)
    assert "".join(begun) == "abbaabba"


FAILING = {
    "in a burst": {"broken": BROKEN, "works": FAST},
    "by a sample": {"works": FAST, "broken": SAMPLE_RAISES},
}


@pytest.mark.parametrize("sides", FAILING.values(), ids=FAILING)
def test_a_side_that_fails_is_an_answer(monkeypatch, sides):
    found = compared(monkeypatch, **sides)
    assert found["broken"].error is not None
    assert "broken failed: " in found.report()
    assert "Only works worked." in found.report()
    assert found["works"].measurement is not None
    assert found.ratios == {}


def test_where_both_sides_fail_nothing_is_compared(monkeypatch):
    assert compared(monkeypatch, one=BROKEN, other=AT_ONCE).rates == {}


class ShortEnds(SimulatedProbe):
    """On the faster machine a burst has the last batch of an epoch, which is shorter."""

    def burst(self, config, plan):
        outcome = super().burst(config, plan)
        return replace(outcome, batch_size=30.0) if self.machine == FAST else outcome


def test_different_batch_sizes_are_compared_by_samples(monkeypatch):
    small, large = SimulatedMachine(batch_size=16, cpu_s=0.02), SimulatedMachine(batch_size=32)
    found = compared(monkeypatch, 6, small=small, large=large)
    assert found.ratios["large"].value == pytest.approx(1.0, abs=0.1)
    assert Caution.BATCH_SIZES_DIFFER.said_by(found.notes[0])
    assert "(small 16, large 32)" in found.report()
    # AND the last batch of an epoch, which is smaller, makes none differ
    found = compared(monkeypatch, 6, ShortEnds, now=FAST, then=SLOW)
    assert found["now"].measurement.batch_size < 0.95 * found["then"].measurement.batch_size
    assert found.notes == ()


def test_batches_a_second_are_not_compared_with_samples(monkeypatch):
    sides, uncounted = {"now": loader(), "then": loader(shuffle=True)}, []

    def warmup_of(workload):
        return {"counts_batches": workload.shuffles in uncounted}

    on_simulated_machines(monkeypatch, lambda workload: FAST, warmup_of=warmup_of)
    assert compare(sides, progress=False, budget=3).rate_unit == "samples/s"
    uncounted.append(True)
    with pytest.raises(ValueError, match=r"sides\['then'\] does not tell the number of samples"):
        compare(sides, progress=False)
    uncounted.append(False)
    assert compare(sides, progress=False, budget=3).rate_unit == "batches/s"


WAITS = replace(SLOW, cpu_s=0.01, wait_s=0.03)
PLACES = {
    # machines, bytes that the second reads from a disk, samples: do rounds read the same; a note
    "in memory": ([SLOW, FAST], 0, 10**6, True, False),
    "in memory, and few": ([SLOW, FAST], 0, 64, True, False),
    "one from a disk": ([SLOW, FAST], 4096, 10**6, False, False),
    "one from a disk, and few": ([SLOW, FAST], 4096, 64, False, True),
    "what does not count": ([SLOW, WAITS], 0, 10**6, False, False),
}


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES)
def test_sides_read_the_same_only_from_memory(monkeypatch, case):
    (now, then), read_bytes, length, is_same, is_noted = case
    places = {now: [], then: []}

    class Reading(SimulatedProbe):
        def burst(self, config, plan):
            places[self.machine].append(plan.place)
            from_disk = read_bytes if self.machine == then else 0
            return replace(super().burst(config, plan), read_bytes=from_disk)

    found = compared(monkeypatch, 6, Reading, length=length, now=now, then=then)
    in_turn = [number if is_same else None for number in range(len(found.rounds))]
    assert places == {now: [None, *in_turn], then: [None, *in_turn]}
    assert [Caution.READ_TWICE.said_by(each) for each in found.notes] == [True] * is_noted


LOADER = loader()


@pytest.mark.parametrize(
    ("sides", "error", "message"),
    [
        (LOADER, TypeError, "is not a dict of loaders by name"),
        ({"a": LOADER}, ValueError, "^sides=.* has fewer than two sides. Try "),
        ({"a": LOADER, 2: LOADER}, TypeError, "sides has the name 2, which is not a string"),
        ({"a": LOADER, "b": "path"}, TypeError, r"sides\['b'\]: data='path' is a path"),
        ({"a": LOADER, "b": (LOADER,)}, TypeError, r"is a tuple of 1. Try \(loader, "),
        ({"a": LOADER, "b": (LOADER, "no")}, TypeError, r"\['b'\]: train_step='no' is not"),
    ],
)  # fmt: skip
def test_wrong_sides_are_named(sides, error, message):
    with pytest.raises(error, match=message):
        compare(sides)


def test_a_side_may_have_its_own_training(monkeypatch):
    model, step = torch.nn.Linear(4, 2), lambda model, batch: None

    def machine_of(workload):
        own = workload.training
        return SLOW if own.train_step is None and own.model is model else FAST

    on_simulated_machines(monkeypatch, machine_of)
    sides = {"now": LOADER, "step": (LOADER, step), "model": (Own([0] * 9), torch.nn.Linear(4, 2))}
    found = compare(sides, model, progress=False, budget=6)
    assert set(found.ratios) == {"step", "model"}
    assert "model: Own has its own __iter__, which the trials do not run" in found.report()
    assert all(ratio.value > 1.3 for ratio in found.ratios.values())
