from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest
from autotune_loader.report.standings import standings
from autotune_loader.report.tables import render_report, render_trials
from autotune_loader.results.loader_file import Finals, Measured
from report.example import FULL, KILLED

from autotune_loader.report.plots.workers import plot_workers
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement, MemoryUse
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial


def ran(number: int, config: LoaderConfig, rate: float | Failure) -> Trial:
    if isinstance(rate, Failure):
        return Trial(number=number, config=config, role="search", failure=rate)
    measurement = Measurement(
        samples_per_s=Interval(value=rate, low=rate - 10, high=rate + 10, count=20), samples=640, window_s=0.5,
        batch_size=32, first_batch_s=0.25, wait_share=0.125, service_s=0.08, service_cpu_s=0.07, receive_s=0.001,
        step_s=0.02, memory=MemoryUse(rss_bytes=900 << 20, pss_bytes=640 << 20),
    )  # fmt: skip
    return Trial(number=number, config=config, role="search", measurement=measurement)


NONE, ONE = LoaderConfig(), LoaderConfig(num_workers=1)
TWO, THREE = LoaderConfig(num_workers=2, pin_memory=True), LoaderConfig(num_workers=3, pin_memory=True)
CROWDED = LoaderConfig(num_workers=8, prefetch_factor=16)
RATES: dict[LoaderConfig, Any] = {NONE: 400.0, TWO: 1200.0, THREE: 1210.0, ONE: 700.0, CROWDED: FULL}
TRIED = tuple(ran(number, *each) for number, each in enumerate(RATES.items()))
FINALS = Finals(configs=(TWO, THREE, NONE), rounds=((1200.0, 1204.0, 402.0), (1190.0, 1194.0, 398.0)), as_fast=(THREE,))
NEVER_RAN = replace(FINALS, configs=(*FINALS.configs, ONE), rounds=tuple((*each, None) for each in FINALS.rounds))
SMALL = TuningResult(best=TWO, status="complete", finals=FINALS, trials=TRIED)
TABLE = """\
   workers  prefetch  also    samples/s  95 % interval  from      wait  first batch   memory
────────────────────────────────────────────────────────────────────────────────────────────
=        3         2  pinned      1,199    1,135–1,263  2 rounds  12 %       250 ms  640 MiB
>        2         2  pinned      1,195    1,068–1,322  2 rounds  12 %       250 ms  640 MiB
b        0         -                400        375–425  2 rounds  12 %       250 ms  640 MiB

         1         2                700        690–710  search    12 %       250 ms  640 MiB

x        8        16                  -              -  failed       -            -        -

x 8 workers, prefetch 16: shared memory (batches): /dev/shm is full [/red]; start with --shm-size=1g

> chosen   = equally fast   b before tuning   x failed"""


def test_draws_the_table() -> None:
    assert render_trials(SMALL) == TABLE
    # WHEN a finalist that failed in no burst never ran in the rounds THEN it is not called failed
    assert render_trials(replace(SMALL, finals=NEVER_RAN)) == TABLE


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # As fast is who the rule of the choice called so; one round makes no interval.
        ({"finals": replace(FINALS, as_fast=())}, "         3         2  pinned      1,199    1,135–1,263  2 rounds"),
        ({"finals": replace(FINALS, rounds=((1200.0, 1000.0, 400.0),))}, "1,000              -  1 round "),
        ({"status": "undecided", "summary": ("Not decided: why.",)}, "> safest guess   = equally fast"),
        ({"measured": Measured(gpu_busy_share=0.931)}, "GPU: at work on a step for 93 % of the time."),
        (
            {"measured": Measured(gpu_busy_share=0.931, gpu_util=0.95)},
            "for 93 % of the time; NVML saw it busy for 95 %",
        ),
        ({"trials": (), "finals": Finals()}, "No configuration was tried."),
        ({"status": "fallback"}, "fallback: 2 workers"),
    ],
)
def test_a_report_tells_what_is_special(changes: dict[str, Any], line: str) -> None:
    assert line in render_report(replace(SMALL, **changes))
    assert line not in render_report(SMALL)


def test_a_report_draws_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)  # it draws one as it is imported
    before = random.getstate()
    render_report(SMALL)
    assert random.getstate() == before


@pytest.mark.parametrize("width", [80, 140])
def test_a_report_says_what_was_found_within_the_width(width: int, result: TuningResult) -> None:
    text = render_report(result, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    told = " ".join(text.split())
    for sentence in (*result.summary, f"Verdict: {result.verdict.sentence}", f"! {result.warnings[0]}", KILLED.message):
        assert " ".join(sentence.split()) in told
    assert "- Implement __getitems__ to decode a batch at once (about +10 %): 10 % of a worker's time" in told
    stages = told.split("A sample's time in a worker: ")[1]
    assert stages.startswith("decode 60 % of the time, 75 % of the CPU 1.2 ms photos.py:41, PIL.Image.convert read ")
    assert "A sample's time" not in render_report(replace(result, stage_times=()))


def test_many_trials_are_cut_but_never_the_chosen_one_and_the_baseline() -> None:
    trials = tuple(ran(n, LoaderConfig(num_workers=n), 100.0 * (1 + n)) for n in range(41))
    text = render_trials(TuningResult(best=trials[1].config, status="partial", baseline=NONE, trials=trials))
    assert "\n>        1 " in text
    assert "\nb        0 " in text
    assert "and 23 more configurations, all in result.to_dataframe()" in text


def test_rates_of_batches_are_called_so_everywhere() -> None:
    rate = Interval(value=1195.0, low=1068.0, high=1322.0, count=2)
    told = replace(SMALL, measured=Measured(samples_per_s=rate, rate_unit="batches/s"))
    assert "batches/s" in render_trials(told).splitlines()[0]
    assert "samples/s" not in render_trials(told)
    assert "batches/s" in repr(told)
    assert plot_workers(told).axes[0].get_ylabel() == "batches per second"


def test_a_configuration_has_one_row_whether_or_not_workers_live_on() -> None:
    # GIVEN blocks of a live loader that ran with and without workers that live on, whose rates nobody tells apart
    two, kept = LoaderConfig(num_workers=2), LoaderConfig(num_workers=2, persistent_workers=True)
    trials = tuple(ran(number, config, 1000.0) for number, config in enumerate((two, kept, ONE, NONE)))
    live = replace(SMALL, best=kept, trials=trials, finals=Finals(), origin="live")
    assert [row.config for row in standings(live)].count(two) == 0
    assert len(standings(live)) == 3
