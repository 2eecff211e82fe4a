"""The sampler in studies as users run them: led near the best, stopped, with records that it cannot read and own knobs."""

import optuna
import pytest

from autotune_loader.search.sampler import RECORD, TwinSampler, quiet_optuna
from autotune_loader.search.space import Context, Space
from autotune_loader.values import Failure, LoaderConfig, Trial


@pytest.fixture(autouse=True)
def quiet():
    with quiet_optuna():
        yield


def study_with(sampler):
    return optuna.create_study(direction="maximize", sampler=sampler)


def saturating(trial, most=64):
    """A user's own objective: six workers are enough, and deep queues help by a hair."""
    workers = trial.suggest_int("num_workers", 0, most)
    prefetch = trial.suggest_int("prefetch_factor", 1, 8, log=True) if workers else 0
    return 1000.0 * min(max(workers, 0.5), 6) * (1 + 0.0005 * prefetch)


def test_a_users_own_objective_is_led_near_its_best_with_few_workers_and_stopped():
    sampler = TwinSampler(context=Context(usable_cores=8))
    study = study_with(sampler)
    study.optimize(saturating, n_trials=40, callbacks=[sampler.stop_when_safe])
    assert study.best_value >= 0.98 * 6000
    choice = sampler.belief(study).choice
    assert 6 <= choice.num_workers <= 12
    # THEN every trial is one of its own: what ran is what the study says
    assert len({tuple(trial.params.items()) for trial in study.trials}) == len(study.trials)
    # AND a study of Optuna's own sampler, which the twin only watches, can be stopped, too
    watching, study = TwinSampler(Space(max_workers=3)), study_with(optuna.samplers.TPESampler(seed=0))
    study.optimize(lambda trial: saturating(trial, 3), n_trials=40, callbacks=[watching.stop_when_safe])
    assert len(study.trials) < 40


@pytest.mark.parametrize("record", ["{}", "no JSON", 3, None], ids=["another release's", "no JSON", "no text", "none"])
def test_a_record_that_cannot_be_read_leaves_the_value(record):
    study = study_with(sampler := TwinSampler())
    known = {"params": {"num_workers": 3, "prefetch_factor": 2}, "value": 500.0}
    attributes = {} if record is None else {RECORD: record}
    distributions = sampler.space.distributions()
    study.add_trial(optuna.trial.create_trial(distributions=distributions, user_attrs=attributes, **known))
    assert [(t.config.num_workers, t.samples_per_s) for t in sampler.trials(study)] == [(3, 500.0)]


def test_what_came_of_a_burst_counts_though_ctrl_c_came_before_optuna_was_told():
    study = study_with(sampler := TwinSampler())
    trial = study.ask(sampler.space.distributions())
    known = Trial(number=0, config=LoaderConfig(), failure=Failure(kind="crashed", phase="start", message="gone"))
    sampler.record(trial, known)
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    study.tell(study.ask(sampler.space.distributions()), state=optuna.trial.TrialState.FAIL)  # before its burst
    assert sampler.trials(study) == [known]


def test_a_knob_of_the_users_is_drawn():
    # GIVEN an objective that asks for more than a loader has, and for a prefetch also without workers
    def own(trial):
        prefetch = trial.suggest_int("prefetch_factor", 1, 8, log=True)
        return trial.suggest_int("num_workers", 0, 64) + prefetch + trial.suggest_float("learning_rate", 0.0, 1.0)

    study = study_with(sampler := TwinSampler(Space()))
    study.optimize(own, n_trials=4)
    assert LoaderConfig() in [trial.config for trial in sampler.trials(study)]
