"""The sampler in studies as users run them: Optuna's own contract, led near the best, stopped, with records it cannot read."""

import pickle
from collections import Counter

import optuna
import pytest
from optuna.testing.pytest_samplers import BasicSamplerTestCase, SingleOnlySamplerTestCase

from autotune_loader.search.sampler import ORDER, RECORD, ROUND, TwinSampler, quiet_optuna
from autotune_loader.search.space import Context, Space
from autotune_loader.values import Failure, LoaderConfig, Trial


@pytest.fixture(autouse=True)
def quiet():
    with quiet_optuna():
        yield


class TestContractOfOptuna(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self):
        return TwinSampler

    @pytest.mark.parametrize("n_jobs", [1, 2])
    def test_what_it_proposes_together_is_of_the_space_and_pythons_own(self, sampler, n_jobs):
        study = study_with(sampler(Space(pin_memory=(False, True))))
        study.optimize(
            lambda trial: study.sampler.space.suggest(trial).num_workers + 1.0,
            n_trials=8,
            n_jobs=n_jobs,
        )
        for trial in study.trials:
            assert all(
                d._contains(d.to_internal_repr(trial.params[name]))
                for name, d in trial.distributions.items()
            )
            assert {type(value) for value in trial.params.values()} <= {int, bool}


def study_with(sampler):
    return optuna.create_study(direction="maximize", sampler=sampler)


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
def test_a_users_own_objective_is_led_near_its_best_in_15_trials_and_stopped(
    objective, best, workers
):
    sampler = TwinSampler(context=Context(usable_cores=8))
    study = study_with(sampler)
    study.optimize(objective, n_trials=15, callbacks=[sampler.stop_when_safe])
    assert study.best_value >= 0.98 * best
    assert workers[0] <= sampler.belief(study).choice.num_workers <= workers[1]
    # THEN what is proposed again is proposed in rounds, and the study says so, pickled, too
    kept = pickle.loads(pickle.dumps(study)).trials
    alone = [tuple(trial.params.items()) for trial in kept if ROUND not in trial.user_attrs]
    assert max(Counter(alone).values()) == 1


def lists(trial):
    return trial.suggest_categorical("num_workers", [0, 2, 4]), trial.suggest_categorical(
        "prefetch_factor", [2, 4, 8]
    )


def ranges(trial):
    ahead = trial.suggest_int("prefetch_factor", 2, 10)
    return trial.suggest_int("num_workers", 2, 16, step=2), ahead


def logarithmic(trial):
    return trial.suggest_int("num_workers", 1, 64, log=True), 2


def real(trial):
    return int(trial.suggest_float("num_workers", 0.0, 8.0)), 2


def deep(trial):
    return trial.suggest_int("num_workers", 0, 8), trial.suggest_int(
        "prefetch_factor", 16, 64, log=True
    )


def flags(trial):
    trial.suggest_categorical("persistent_workers", [True, False])
    trial.suggest_categorical("multiprocessing_context", ["fork", "spawn"])
    return 2.0 if trial.suggest_categorical("pin_memory", [True, False]) else 1.0


def flag_as_a_number(trial):
    return 1.0 + trial.suggest_int("pin_memory", 0, 1)


def batches(trial):
    return trial.suggest_categorical("batch_size", [16, 32]) / 16


def batches_of_a_range(trial):
    return trial.suggest_int("batch_size", 16, 256, log=True) / 64


@pytest.mark.parametrize(
    ("ask", "rest", "possible"),
    [
        (lists, None, 4.0),
        (ranges, None, 6.0),
        (logarithmic, None, 6.0),
        (real, None, 6.0),
        (deep, None, 6.0),
        (lists, flags, 8.0),
        (ranges, flag_as_a_number, 12.0),
        (logarithmic, batches, 12.0),
        (lists, batches_of_a_range, 16.0),
    ],
)
def test_an_objective_asks_in_its_own_way_and_is_led_to_the_best_that_it_can_ask_for(
    ask, rest, possible
):
    def objective(trial):
        workers, ahead = ask(trial)
        return min(max(workers, 0.5), 6) * (1 - 0.01 / ahead) * (rest(trial) if rest else 1.0)

    study = study_with(TwinSampler(context=Context(usable_cores=8)))
    study.optimize(objective, n_trials=24)
    late = sorted(trial.value for trial in study.trials[16:])
    assert late[len(late) // 2] >= 0.95 * possible


def test_a_sampler_that_is_used_again_knows_nothing_of_the_study_before():
    def tried(sampler, name):
        study = optuna.create_study(direction="maximize", sampler=sampler, study_name=name)
        study.optimize(saturating, n_trials=4)
        return [trial.params for trial in study.trials]

    sampler, new = (TwinSampler(context=Context(usable_cores=8)) for _ in range(2))
    assert tried(sampler, "a") != []
    assert tried(sampler, "a") == tried(new, "b")


def test_it_begins_with_as_many_workers_as_the_limits_of_this_process_leave_cores(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # one of many ranks
    assert TwinSampler().context.usable_cores == 1


def test_a_study_of_another_sampler_is_only_watched():
    watching, study = (
        TwinSampler(Space(max_workers=3)),
        study_with(optuna.samplers.TPESampler(seed=0)),
    )
    study.optimize(
        lambda trial: saturating(trial, 3), n_trials=40, callbacks=[watching.stop_when_safe]
    )
    assert len(study.trials) < 40


@pytest.mark.parametrize(
    "bounds", [(0, 4), (1, 64), (2, 2), (0, 64, 4)], ids=["few", "some", "one value", "in steps"]
)
def test_an_objective_with_bounds_of_its_own_ends(bounds):
    sampler, step = (
        TwinSampler(context=Context(usable_cores=8)),
        bounds[2] if len(bounds) > 2 else 1,
    )
    study = study_with(sampler)

    def objective(trial):
        return 100.0 * min(trial.suggest_int("num_workers", *bounds[:2], step=step), 6) + 1

    study.optimize(objective, n_trials=60, callbacks=[sampler.stop_when_safe])
    assert len(study.trials) < 60
    best = max(trial.value for trial in study.trials)
    assert 100.0 * min(sampler.belief(study).choice.num_workers, 6) + 1 >= 0.98 * best
    # THEN a round has the number of its first trial, so that no other process has the same
    rounds = [
        (t.user_attrs[ROUND], t.user_attrs[ORDER], t.number)
        for t in study.trials
        if ROUND in t.user_attrs
    ]
    assert all(round_ + order == number for round_, order, number in rounds)
    assert len(sampler.belief(study).rounds) == len({round_ for round_, *_ in rounds}) >= 2


def test_a_study_that_minimises_is_refused_with_the_call_that_works():
    study = optuna.create_study(sampler=TwinSampler())
    with pytest.raises(
        ValueError, match=r"minimises; optuna.create_study\(direction='maximize', .* would work"
    ):
        study.optimize(lambda trial: trial.suggest_int("num_workers", 0, 4), n_trials=1)


def test_what_raises_is_not_proposed_again():
    def objective(trial):
        if trial.suggest_int("num_workers", 0, 64) > 12:
            raise RuntimeError("DataLoader worker is killed by signal: Killed")
        return saturating(trial)

    study = study_with(sampler := TwinSampler(context=Context(usable_cores=16)))
    study.optimize(
        objective, n_trials=30, catch=(RuntimeError,), callbacks=[sampler.stop_when_safe]
    )
    failed = Counter(
        trial.params["num_workers"] for trial in study.trials if trial.state.name == "FAIL"
    )
    assert max(failed.values()) == 1
    assert study.best_value >= 0.98 * 6000


@pytest.mark.parametrize(
    "record", ["{}", "no JSON", 3, None], ids=["another release's", "no JSON", "no text", "none"]
)
def test_a_record_that_cannot_be_read_leaves_the_value(record):
    study = study_with(sampler := TwinSampler())
    known = {"params": {"num_workers": 3, "prefetch_factor": 2}, "value": 500.0}
    attributes = {} if record is None else {RECORD: record}
    distributions = sampler.space.distributions()
    study.add_trial(
        optuna.trial.create_trial(distributions=distributions, user_attrs=attributes, **known)
    )
    assert [(t.config.num_workers, t.samples_per_s) for t in sampler.trials(study)] == [(3, 500.0)]


def test_what_came_of_a_burst_counts_though_ctrl_c_came_before_optuna_was_told():
    study = study_with(sampler := TwinSampler())
    trial = study.ask(sampler.space.distributions())
    known = Trial(
        number=0,
        config=LoaderConfig(),
        failure=Failure(kind="crashed", phase="start", message="gone"),
    )
    sampler.record(trial, known)
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    study.tell(
        study.ask(sampler.space.distributions()), state=optuna.trial.TrialState.FAIL
    )  # before its burst
    assert sampler.trials(study) == [known]


def test_a_knob_of_the_users_is_drawn():
    # GIVEN an objective that asks for more than a loader has, and for a prefetch also without workers
    def own(trial):
        prefetch = trial.suggest_int("prefetch_factor", 1, 8, log=True)
        return (
            trial.suggest_int("num_workers", 0, 64)
            + prefetch
            + trial.suggest_float("learning_rate", 0.0, 1.0)
        )

    study = study_with(sampler := TwinSampler(Space()))
    study.optimize(own, n_trials=4)
    assert LoaderConfig() in [trial.config for trial in sampler.trials(study)]
