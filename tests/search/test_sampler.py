"""The sampler in studies as users run them: led near the best, stopped, with odd records."""

import datetime
import pickle
from collections import Counter

import optuna
import pytest
from optuna.testing.pytest_samplers import BasicSamplerTestCase, SingleOnlySamplerTestCase
from optuna.trial import TrialState

from autotune_loader.search.sampler import ORDER, RECORD, ROUND, TwinSampler, quiet_optuna
from autotune_loader.search.space import Context, Space
from autotune_loader.values import Failure, LoaderConfig, Trial
from tests.support import with_workers

EIGHT_CORES = Context(usable_cores=8)


@pytest.fixture(autouse=True)
def quiet():
    with quiet_optuna():
        yield


class TestContractOfOptuna(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self):
        return TwinSampler

    @pytest.mark.parametrize("n_jobs", [1, 2])
    def test_proposals_are_of_the_space_and_pythons_own(self, sampler, n_jobs):
        study = study_with(sampler(Space(pin_memory=(False, True))))
        suggest = study.sampler.space.suggest
        study.optimize(lambda trial: suggest(trial).num_workers + 1.0, n_trials=6, n_jobs=n_jobs)
        for trial in study.trials:
            for name, value in trial.params.items():
                each = trial.distributions[name]
                assert each._contains(each.to_internal_repr(value))
                assert type(value) in (int, bool)


def study_with(sampler, **storage):
    return optuna.create_study(direction="maximize", sampler=sampler, **storage)


def saturating(trial, most=64):
    """A user's own objective: six workers are enough, and deep queues help by a hair."""
    workers = trial.suggest_int("num_workers", 0, most)
    prefetch = trial.suggest_int("prefetch_factor", 1, 8, log=True) if workers else 0
    return 1000.0 * min(max(workers, 0.5), 6) * (1 + 0.0005 * prefetch)


def peaked(trial):
    """Best at 20 workers."""
    return 1000.0 / (1 + ((trial.suggest_int("num_workers", 0, 64) - 20) / 25) ** 2)


@pytest.mark.parametrize(
    ("objective", "best", "workers"), [(saturating, 6000, (6, 12)), (peaked, 1000, (16, 24))]
)
def test_an_objective_is_led_near_its_best(objective, best, workers, tmp_path):
    def noted(trial):
        seen.append(trial.user_attrs)
        return objective(trial)

    file, seen = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study")), []
    storage = optuna.storages.JournalStorage(file)
    study = study_with(sampler := TwinSampler(context=EIGHT_CORES), storage=storage)
    study.optimize(noted, n_trials=15, callbacks=[sampler.stop_when_safe])
    assert study.best_value >= 0.98 * best
    assert workers[0] <= sampler.belief(study).choice.num_workers <= workers[1]
    # THEN what is proposed again is proposed in rounds; objective and study say so, pickled, too
    kept = pickle.loads(pickle.dumps(study)).trials
    assert [trial.user_attrs for trial in kept] == seen
    alone = [tuple(trial.params.items()) for trial in kept if ROUND not in trial.user_attrs]
    assert max(Counter(alone).values()) == 1


def flags(trial):
    trial.suggest_categorical("persistent_workers", [True, False])
    trial.suggest_categorical("multiprocessing_context", ["fork", "spawn"])
    return 2.0 if trial.suggest_categorical("pin_memory", [True, False]) else 1.0


WORKERS = {
    "listed": lambda trial: trial.suggest_categorical("num_workers", [0, 2, 4]),
    "in steps": lambda trial: trial.suggest_int("num_workers", 2, 16, step=2),
    "logarithmic": lambda trial: trial.suggest_int("num_workers", 1, 64, log=True),
    "real": lambda trial: int(trial.suggest_float("num_workers", 0.0, 8.0)),
    "a range": lambda trial: trial.suggest_int("num_workers", 0, 8),
}
PREFETCH = {
    "listed": lambda trial: trial.suggest_categorical("prefetch_factor", [2, 4, 8]),
    "a range": lambda trial: trial.suggest_int("prefetch_factor", 2, 10),
    "deep": lambda trial: trial.suggest_int("prefetch_factor", 16, 64, log=True),
    "": lambda trial: 2,
}
REST = {
    "flags": flags,
    "a flag as a number": lambda trial: 1.0 + trial.suggest_int("pin_memory", 0, 1),
    "listed sizes": lambda trial: (
        (trial.suggest_categorical("batch_size", [None, 16, 32]) or 8) / 16
    ),
    "a range of sizes": lambda trial: trial.suggest_int("batch_size", 16, 256, log=True) / 64,
    "": lambda trial: 1.0,
}


@pytest.mark.parametrize(
    ("workers", "prefetch", "rest", "possible"),
    [
        ("real", "", "", 6.0),
        ("a range", "deep", "", 6.0),
        ("listed", "listed", "flags", 8.0),
        ("in steps", "a range", "a flag as a number", 12.0),
        ("logarithmic", "", "listed sizes", 12.0),
        ("listed", "listed", "a range of sizes", 16.0),
    ],
)
def test_an_objective_asks_in_its_own_way(workers, prefetch, rest, possible):
    def objective(trial):
        ahead, count = PREFETCH[prefetch](trial), WORKERS[workers](trial)
        return min(max(count, 0.5), 6) * (1 - 0.01 / ahead) * REST[rest](trial)

    study = study_with(TwinSampler(context=EIGHT_CORES))
    study.optimize(objective, n_trials=24)
    late = sorted(trial.value for trial in study.trials[16:])
    assert late[len(late) // 2] >= 0.95 * possible


def test_a_sampler_knows_nothing_of_an_earlier_study():
    def tried(sampler, name):
        study = optuna.create_study(direction="maximize", sampler=sampler, study_name=name)
        study.optimize(saturating, n_trials=4)
        return [trial.params for trial in study.trials]

    sampler = TwinSampler(context=EIGHT_CORES)
    assert tried(sampler, "a") == tried(sampler, "b") != []
    # AND studies in memory may have one name
    assert tried(sampler, "b") == tried(sampler, "a")


def test_it_begins_with_the_cores_of_this_process(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # one of many ranks
    assert TwinSampler().context.usable_cores == 1


def test_a_study_of_another_sampler_is_only_watched():
    watching = TwinSampler(Space(max_workers=3))
    study, stop = study_with(optuna.samplers.TPESampler(seed=0)), watching.stop_when_safe
    study.optimize(lambda trial: saturating(trial, 3), n_trials=40, callbacks=[stop])
    assert len(study.trials) < 40


@pytest.mark.parametrize(
    ("low", "high", "step"), [(0, 4, 1), (1, 64, 1), (2, 2, 1), (0, 64, 4)]
)  # fmt: skip
def test_an_objective_with_bounds_of_its_own_ends(low, high, step):
    study = study_with(sampler := TwinSampler(context=EIGHT_CORES))

    def objective(trial):
        return 100.0 * min(trial.suggest_int("num_workers", low, high, step=step), 6) + 1

    study.optimize(objective, n_trials=60, callbacks=[sampler.stop_when_safe])
    assert len(study.trials) < 60
    choice, best = sampler.belief(study).choice, max(trial.value for trial in study.trials)
    assert 100.0 * min(choice.num_workers, 6) + 1 >= 0.98 * best
    # THEN a round has the number of its first trial, so that no other process has the same
    of_rounds = [trial for trial in study.trials if ROUND in trial.user_attrs]
    for trial in of_rounds:
        assert trial.user_attrs[ROUND] + trial.user_attrs[ORDER] == trial.number
    rounds = {trial.user_attrs[ROUND] for trial in of_rounds}
    assert len(sampler.belief(study).rounds) == len(rounds) >= 2


def test_a_study_that_minimises_is_refused():
    study = optuna.create_study(sampler=TwinSampler())
    says = r"minimises. Try optuna.create_study\(direction='maximize', .*."
    with pytest.raises(ValueError, match=says):
        study.optimize(lambda trial: trial.suggest_int("num_workers", 0, 4), n_trials=1)


def test_what_raises_is_not_proposed_again():
    def objective(trial):
        if trial.suggest_int("num_workers", 0, 64) > 12:
            raise RuntimeError("DataLoader worker is killed by signal: Killed")
        return saturating(trial)

    study = study_with(sampler := TwinSampler(context=Context(usable_cores=16)))
    stop = [sampler.stop_when_safe]
    study.optimize(objective, n_trials=30, catch=(RuntimeError,), callbacks=stop)
    failed = [each.params["num_workers"] for each in study.trials if each.state.name == "FAIL"]
    assert len(failed) == len({*failed}) > 0
    assert study.best_value >= 0.98 * 6000


@pytest.mark.parametrize(
    ("record", "rate"), [("{}", 500.0), ("no JSON", 500.0), (3, 500.0), (None, 0.5), (None, 0.0)]
)
def test_an_unreadable_record_leaves_the_value(record, rate):
    study = study_with(sampler := TwinSampler())
    known = {"params": {"num_workers": 3, "prefetch_factor": 2}, "value": rate}
    attributes = {} if record is None else {RECORD: record}
    legal = sampler.space.distributions()
    study.add_trial(optuna.trial.create_trial(distributions=legal, user_attrs=attributes, **known))
    [trial] = sampler.trials(study)
    assert trial.config.num_workers == 3
    assert trial.samples_per_s == (rate or None)  # of none the objective has failed
    assert (trial.failure is None) == (rate > 0)


def told(sampler, *trials):
    """A study with these numbers of workers, samples/s and rounds."""
    study, legal = study_with(sampler), sampler.space.distributions()
    for workers, rate, round_ in trials:
        known = {"params": {"num_workers": workers, "prefetch_factor": 2}, "value": rate}
        known["user_attrs"] = {} if round_ is None else {ROUND: round_}
        study.add_trial(optuna.trial.create_trial(distributions=legal, **known))
    return study


@pytest.mark.parametrize(
    ("ratio", "is_one"),
    [(2.0 / 1.149, False), (2.0 / 1.151, True), (2.2 * 1.149, False), (2.2 * 1.151, True)],
)
def test_earlier_rounds_are_one_once_contradicted(ratio, is_one):
    # GIVEN rounds of an earlier run, in which one was 2 and 2.2 times as fast, and another now
    sampler = TwinSampler()
    before = (2, 100.0, 0), (4, 200.0, 0), (2, 100.0, 2), (4, 220.0, 2)
    study = told(sampler, *before, (4, 100.0 * ratio, 4), (2, 100.0, 4), (8, 100.0, 4))
    sampler.since = 4
    rounds = [trial.round for trial in sampler.trials(study)]
    assert rounds == [0, 0, *([0, 0] if is_one else [2, 2]), 4, 4, 4]


@pytest.mark.parametrize(
    ("tried", "left_s", "workers"),
    [(1, 0.0, 1), (2, 1.0, 2), (2, 0.0, None)],
)
def test_a_budget_ends_the_beginning_after_two_bursts(tried, left_s, workers):
    sampler = TwinSampler(first=[with_workers(count) for count in range(4)])
    study = told(sampler, *((count, 100.0, None) for count in range(tried)))
    sampler.seconds_left = lambda: left_s
    config = sampler.upcoming(study)
    assert (config and config.num_workers) == workers
    assert sampler.stop_reason == (None if config else "BUDGET")


def test_what_others_measure_is_not_proposed():
    # GIVEN trials of other processes, of which the second has run for too long to live
    sampler = TwinSampler(first=[with_workers(count) for count in range(4)])
    study, legal = told(sampler, (0, 100.0, None)), sampler.space.distributions()
    for workers, seconds in ((1, 59), (2, 61)):
        known = {"params": sampler.space.params(with_workers(workers)), "distributions": legal}
        trial = optuna.trial.create_trial(state=TrialState.RUNNING, **known)
        trial.datetime_start -= datetime.timedelta(seconds=seconds)
        study.add_trial(trial)
    study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING))  # has asked for nothing
    assert sampler.upcoming(study) == with_workers(2)
    # AND what the caller enqueues takes no turn
    study.enqueue_trial(sampler.space.params(with_workers(3)))
    assert sampler.space.suggest(study.ask()) == with_workers(3)
    assert sampler.upcoming(study) == with_workers(2)


def test_a_proposal_that_became_another_is_barred():
    sampler = TwinSampler(first=[with_workers(2)])
    study = told(sampler, (0, 100.0, None))
    proposed = sampler.space.suggest(trial := study.ask())
    assert proposed in sampler.belief(study).configs  # under way
    burst = sampler.trials(study)[0].measurement
    sampler.record(trial, Trial(number=1, config=with_workers(3), measurement=burst))
    study.tell(trial, 100.0)
    assert proposed not in sampler.belief(study).configs


def test_without_any_first_it_begins_without_workers():
    sampler = TwinSampler(first=[])
    assert sampler.upcoming(study_with(sampler)) == LoaderConfig()


EARLIER = (2, 100.0, 0), (4, 200.0, 0), (8, 150.0, 0)


@pytest.mark.parametrize(("own", "sides"), [(2, (4, 5, 2)), (None, (4, 5)), (96, (4, 5))])
def test_earlier_rounds_are_looked_at_again(own, sides):
    # GIVEN rounds of an earlier run, in which four workers were the fastest
    sampler = TwinSampler(baseline=None if own is None else with_workers(own))
    study, sampler.since = told(sampler, *EARLIER), 3
    for place in range(len(sides)):
        config, attributes = sampler.take(study, 3 + place)
        assert config.num_workers in sides
        assert attributes == {ROUND: 3, ORDER: place}
        assert sampler.is_within_round() == (place + 1 < len(sides))
    # BUT not where a round does not fit
    sampler.seconds_left = lambda: -1.0
    assert sampler.take(told(sampler, *EARLIER), 3) is None


@pytest.mark.parametrize("count", [15, 16])
def test_after_16_configurations_none_is_proposed_anew(count):
    sampler = TwinSampler()
    study = told(sampler, *((workers, 100.0 + workers, None) for workers in range(count)))
    proposed = {config.num_workers for config in sampler.belief(study).configs}
    assert (proposed == {*range(count)}) == (count == 16)


def test_a_burst_counts_that_optuna_was_not_told():
    # GIVEN a Ctrl-C after a burst, and one before the next
    study, failed = study_with(sampler := TwinSampler()), TrialState.FAIL
    trial = study.ask(sampler.space.distributions())
    gone = Failure(kind="crashed", phase="start", message="gone")
    sampler.record(trial, known := Trial(number=0, config=LoaderConfig(), failure=gone))
    study.tell(trial, state=failed)
    study.tell(study.ask(sampler.space.distributions()), state=failed)
    assert sampler.trials(study) == [known]


def test_a_knob_of_the_users_is_drawn():
    # GIVEN an objective that asks for more than a loader has, and prefetch also without workers
    def own(trial):
        prefetch = trial.suggest_int("prefetch_factor", 1, 8, log=True)
        rate = trial.suggest_float("learning_rate", 0.0, 1.0)
        return trial.suggest_int("num_workers", 0, 64) + prefetch + rate

    study = study_with(sampler := TwinSampler(Space()))
    study.optimize(own, n_trials=4)
    assert LoaderConfig() in [trial.config for trial in sampler.trials(study)]
