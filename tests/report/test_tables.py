from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
from report.example import BASELINE

from autotune_loader.report.plots.workers import plot_workers
from autotune_loader.report.standings import standings
from autotune_loader.report.tables import render_report, render_trials
from autotune_loader.results.loader_file import Finals, Measured
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement, MemoryUse
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial

FULL = Failure(kind="shared_memory", phase="batches", message="/dev/shm is full [/red]; start with --shm-size=1g")


def measurement(rate: float) -> Measurement:
    return Measurement(
        samples_per_s=Interval(value=rate, low=rate - 10, high=rate + 10, count=20), samples=640, window_s=0.5, batch_size=32,
        first_batch_s=0.25, wait_share=0.125, service_s=0.08, service_cpu_s=0.07, receive_s=0.001, step_s=0.02,
        memory=MemoryUse(rss_bytes=900 << 20, pss_bytes=640 << 20),
    )  # fmt: skip


def trial(number: int, config: LoaderConfig, answer: Measurement | Failure) -> Trial:
    key = "failure" if isinstance(answer, Failure) else "measurement"
    return Trial(number=number, config=config, role="search", **{key: answer})


@pytest.fixture
def small_result() -> TuningResult:
    two, three = LoaderConfig(num_workers=2, pin_memory=True), LoaderConfig(num_workers=3, pin_memory=True)
    return TuningResult(
        best=two,
        status="complete",
        baseline=BASELINE,
        trials=(
            trial(0, BASELINE, measurement(400.0)),
            trial(1, two, measurement(1200.0)),
            trial(2, three, measurement(1210.0)),
            trial(3, LoaderConfig(num_workers=1), measurement(700.0)),
            trial(4, LoaderConfig(num_workers=8, prefetch_factor=16), FULL),
        ),
        finals=Finals(
            configs=(two, three, BASELINE),
            rounds=((1200.0, 1204.0, 402.0), (1190.0, 1194.0, 398.0)),
            as_fast=(three,),
        ),
    )


def test_draws_the_table(small_result: TuningResult) -> None:
    assert render_trials(small_result) == "\n".join(
        [
            "   workers  prefetch  also    samples/s  95 % interval  from      wait  first batch   memory",
            "────────────────────────────────────────────────────────────────────────────────────────────",
            "=        3         2  pinned      1,199    1,135–1,263  2 rounds  12 %       250 ms  640 MiB",
            ">        2         2  pinned      1,195    1,068–1,322  2 rounds  12 %       250 ms  640 MiB",
            "b        0         -                400        375–425  2 rounds  12 %       250 ms  640 MiB",
            "",
            "         1         2                700        690–710  search    12 %       250 ms  640 MiB",
            "",
            "x        8        16                  -              -  failed       -            -        -",
            "",
            "x 8 workers, prefetch 16: shared memory (batches): /dev/shm is full [/red]; start with --shm-size=1g",
            "",
            "> chosen   = equally fast   b before tuning   x failed",
        ]
    )


def test_a_report_draws_no_random_number(small_result: TuningResult, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)  # it draws one as it is imported
    before = random.getstate()
    render_report(small_result)
    assert random.getstate() == before


def test_as_fast_is_who_the_rule_of_the_choice_called_so(small_result: TuningResult) -> None:
    told = replace(small_result, finals=replace(small_result.finals, as_fast=()))
    assert "=" not in render_trials(told).splitlines()[2]


def test_no_interval_is_made_up_of_one_round(small_result: TuningResult) -> None:
    finals = replace(small_result.finals, rounds=((1200.0, 1000.0, 400.0),))
    assert "1,000              -  1 round " in render_trials(replace(small_result, finals=finals))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_report_says_what_was_found_within_the_width(width: int, result: TuningResult) -> None:
    text = render_report(result, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    told = " ".join(text.split())
    assert "Use 4 workers, prefetch 4, 1 step thread: 1,307 samples/s" in told
    assert "It is 3.36x (3.31x to 3.41x) as fast as 0 workers (before tuning) in 9 paired rounds." in told
    assert "Verdict: Decoding binds" in told
    assert "- Implement __getitems__ to decode a batch at once (about +10 %): 10 % of a worker's time" in told
    assert "! The dataset's order <was> not shuffled & read twice." in told


def test_many_trials_are_cut_but_never_the_chosen_one_and_the_baseline() -> None:
    configs = [LoaderConfig(num_workers=workers) for workers in range(41)]
    trials = tuple(trial(n, config, measurement(100.0 * (1 + n))) for n, config in enumerate(configs))
    result = TuningResult(best=configs[1], status="partial", baseline=configs[0], trials=trials)
    text = render_trials(result)
    assert "\n>        1 " in text
    assert "\nb        0 " in text
    assert "and 23 more configurations, all in result.to_dataframe()" in text


def test_a_run_without_trials_says_so() -> None:
    text = render_report(TuningResult(best=BASELINE, status="fallback", baseline=BASELINE))
    assert "No configuration was tried." in text
    assert "fallback: 0 workers" in text


def test_a_finalist_that_never_ran_is_not_called_failed(result: TuningResult) -> None:
    finals = result.finals
    more = Finals(
        configs=(*finals.configs, LoaderConfig(num_workers=31)), rounds=tuple((*rates, None) for rates in finals.rounds)
    )
    assert render_trials(replace(result, finals=more)) == render_trials(result)


@pytest.mark.parametrize(
    ("busy", "util", "line"),
    [
        (0.931, None, "GPU: at work on a step for 93 % of the time."),
        (0.931, 0.95, "GPU: at work on a step for 93 % of the time; NVML saw it busy for 95 %"),
    ],
)
def test_what_the_gpu_and_nvml_say_is_told_where_it_is_known(
    busy: float, util: float | None, line: str, small_result: TuningResult
) -> None:
    assert "GPU:" not in render_report(small_result)
    measured = replace(small_result.measured, gpu_busy_share=busy, gpu_util=util)
    assert line in render_report(replace(small_result, measured=measured))


def test_rates_of_batches_are_called_so_everywhere(small_result: TuningResult) -> None:
    rate = Interval(value=1195.0, low=1068.0, high=1322.0, count=2)
    told = replace(small_result, measured=Measured(samples_per_s=rate, rate_unit="batches/s"))
    assert "batches/s" in render_trials(told).splitlines()[0]
    assert "samples/s" not in render_trials(told)
    assert "batches/s" in repr(told)
    assert plot_workers(told).axes[0].get_ylabel() == "batches per second"


def test_the_mark_of_a_guess_is_called_so(small_result: TuningResult) -> None:
    guess = replace(small_result, status="undecided", summary=("Not decided: why.",))
    assert render_trials(guess).splitlines()[-1].startswith("> safest guess   = equally fast")
    assert render_trials(small_result).splitlines()[-1].startswith("> chosen   = equally fast")


def test_a_configuration_has_one_row_whether_or_not_workers_live_on(small_result: TuningResult) -> None:
    # GIVEN blocks of a live loader that ran with and without workers that live on, whose rates nobody tells apart
    two = LoaderConfig(num_workers=2)
    ran = [two, replace(two, persistent_workers=True), LoaderConfig(num_workers=3), LoaderConfig()]
    trials = tuple(trial(number, config, measurement(1000.0)) for number, config in enumerate(ran))
    live = replace(small_result, best=ran[1], baseline=ran[3], trials=trials, finals=Finals(), origin="live")
    assert [row.config for row in standings(live)].count(two) == 0
    assert len(standings(live)) == 3
