"""A result as text: the table as drawn, what is special, 80 columns; lines of progress."""

import logging
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from report.example import FULL, KILLED, STAGES, exactly, ran

from autotune_loader.diagnosis import Answer, Caution, Ended, Undecided
from autotune_loader.diagnosis.messages import Choice, Source
from autotune_loader.report.progress import make_progress
from autotune_loader.report.ranking import ranking
from autotune_loader.report.text import configurations_of, report_of
from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.result import Finding, TuningResult
from autotune_loader.values import Interval, LoaderConfig, Round


def ratio(value, low, high, count=2):
    return Interval(value=value, low=low, high=high, count=count)


NONE, ONE = LoaderConfig(), LoaderConfig(num_workers=1)
TWO, THREE = (LoaderConfig(num_workers=count, pin_memory=True) for count in (2, 3))
CROWDED = LoaderConfig(num_workers=8, prefetch_factor=16)
RATES = [(NONE, 400), (TWO, 1200), (THREE, 1210), (ONE, 700)]
ROUNDS = [(TWO, 1200), (THREE, 1204), (NONE, 402), (TWO, 1190), (THREE, 1194), (NONE, 398)]
TRIED = (
    *(ran(config, ratio(rate, rate - 10, rate + 10), n) for n, (config, rate) in enumerate(RATES)),
    ran(CROWDED, FULL, 4),
    *(ran(config, float(rate), 5 + n, n // 3) for n, (config, rate) in enumerate(ROUNDS)),
)
SMALL = TuningResult(
    best=TWO, status="complete", trials=TRIED, as_fast=(THREE,),
    rate=ratio(1195.0, 1068.0, 1322.0, count=64), speedup=ratio(2.99, 2.8, 3.2),
)  # fmt: skip
TABLE = """\
       workers prefetch options samples/s      95% CI rounds wait  memory
─────────────────────────────────────────────────────────────────────────
equal        3        2 pinned      1,199 1,135–1,263      2  12% 640 MiB
chosen       2        2 pinned      1,195 1,068–1,322      2  12% 640 MiB
before       0        -               400     375–425      2  12% 640 MiB

             1        2               700           -      -  12% 640 MiB

failed       8       16                 -           -      -    -       -

equal: equally fast, but no cheaper than the chosen setting.
rounds: A/B rounds (settings alternate, so drift cancels); -: a single trial.
wait: share of time the training loop spends waiting for data.

8 workers, prefetch 16 failed: shared memory (batches): /dev/shm is full [/red];
  start with --shm-size=1g"""
ALIKE = """\
      workers  prefetch  samples/s  wait   memory
─────────────────────────────────────────────────
            1         2        700   12%  640 MiB
kept        0         -        400   12%  640 MiB

wait: share of time the training loop spends waiting for data."""


def test_what_trials_lack_is_said_first_and_once():
    lacks = Caution.LACKS(text="The trials run without cfg.", step=0.02)
    report = " ".join(replace(SMALL, warnings=(Caution.NOTE(text="Else."), lacks)).report().split())
    assert report.startswith(str(lacks))
    assert report.count("without cfg") == 1
    assert "Warning: Else." in report


def test_the_table_is_drawn_with_a_legend():
    assert configurations_of(SMALL) == TABLE
    # AND without options where these are all the same
    alike = replace(SMALL, trials=(TRIED[0], TRIED[3]), as_fast=(), best=NONE, rate=None)
    assert configurations_of(alike) == ALIKE


def test_kept_workers_share_a_row_unless_chosen():
    kept = replace(TWO, persistent_workers=True)
    both = tuple(ran(config, 100.0, number) for number, config in enumerate((TWO, kept)))
    for best, rows in ((NONE, [kept]), (TWO, [TWO, kept])):
        found = ranking(replace(SMALL, trials=both, best=best))
        assert [row.config for row in found] == rows


TRIES = {"best": NONE, "status": "partial", "found_by": "autoloader"}
DOUBT = {"status": "undecided", "undecided": Undecided.NO_ROUNDS()}
UNSURE = {**DOUBT, "best": NONE, "rate": None, "speedup": None}
CHEAPER = {"speedup": ratio(1.01, 0.95, 1.02), "baseline": THREE}
SWITCHED = {"found_by": "autoloader", "speedup": ratio(3.0, -math.inf, math.inf, count=0)}
BEFORE, RATE = "your current setting, 0 workers", ": 1,195 samples/s (1,068 to 1,322)"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"trials": TRIED[:6]}, "equal 3 2 pinned 1,210 - - 12%"),
        (UNSURE, f"{Undecided.NO_ROUNDS()} {Choice.KEEP(best=NONE, rate='')}"),
        (DOUBT, f"2 A/B rounds). {Undecided.NO_ROUNDS()}"),
        ({"gpu_busy_share": 0.931}, "GPU: busy 93% of the time (from the first to the last"),
        ({"gpu_utilization": 0.641}, "GPU 64% busy (NVML)."),
        ({"ceiling": exactly(1300.0)}, "Ceiling: 1,300 samples/s, the rate of training that never"),
        ({"transfer_ceiling": exactly(1250.0)}, "Transfer: about 1,250 samples/s, the most"),
        ({"trials": ()}, "No configuration was tried."),
        ({"status": "fallback"}, Ended.FALLBACK()),
        ({"status": "partial"}, Choice.SO_FAR()),
        ({"status": "partial"}, "so far 2 2 pinned 1,195"),
        ({**TRIES, "trials": ()}, Choice.NOTHING_YET(baseline=NONE)),
        (TRIES, Choice.NOT_SETTLED(best=THREE, factor=1199 / 400, baseline=NONE)),
        ({**TRIES, "best": TWO}, f"2 A/B rounds). {Choice.SO_FAR()}"),
        ({"best": NONE}, Choice.KEEP(best=NONE, rate=RATE)),
        ({"best": NONE}, Choice.NOTHING_FASTER(tolerance=0.02)),
        ({"speedup": ratio(1.13, 0.85, 1.51)}, Choice.IF_MEMORY()),
        ({**CHEAPER, "baseline": replace(TWO, pin_memory=False)}, Choice.IF_MEMORY()),
        ({"rate": ratio(1195.0, 0.0, 9999.0)}, "2, pinned: about 1,195 samples/s. It is"),
        (CHEAPER, Choice.COSTS_LESS()),
        ({"speedup": None}, Choice.NOT_COMPARED(baseline=BEFORE)),
        (SWITCHED, str(Answer.AT_SWITCH(name="It", ratio=SWITCHED["speedup"], other=BEFORE))),
        ({"source": Source.STORAGE(sample=1e5)}, "The trials read 97.7 KiB per sample from"),
        ({"step": "SmallCnn"}, "Step: SmallCnn."),
    ],
)  # fmt: skip
def test_a_report_tells_what_is_special(changes, line):
    line = str(line)
    assert line in " ".join(report_of(replace(SMALL, **changes), width=400).split())
    assert line not in " ".join(report_of(SMALL, width=400).split())


def test_a_report_says_what_to_use():
    assert str(Choice.USE(best=TWO, rate=RATE)) in " ".join(report_of(SMALL, width=400).split())


def test_nobody_is_told_to_keep_much_slower_settings():
    text = report_of(replace(SMALL, speedup=ratio(1.5, 1.0, 2.25)))
    assert "1.50x its rate (95% CI 1.00x to 2.25x, 2 A/B rounds)" in " ".join(text.split())
    assert "Keep your settings" not in text


def test_a_report_says_all_within_80_columns(result):
    text = result.report()
    assert max(map(len, text.splitlines())) <= 80
    told = " ".join(text.split())
    for part in (result.bottleneck, *result.advice, *result.warnings, result.ended):
        assert str(part) in told
    assert "decode 75% 1.2 ms 1.2 ms PIL.ImageFile" in told
    assert "read 10% 0.6 ms 0.16 ms" in told
    assert "15 trials in 24 s." in told


@pytest.mark.parametrize(
    ("shares", "shown"), [((0.38, 0.6, 0.01, 0.0099), "102"), ([1 / 7] * 7, "012345")]
)
def test_six_stages_of_one_percent_are_listed(shares, shown):
    stages = [
        replace(STAGES[0], stage=f"stage{n}", where=f"{n}{80 * 'x'}.", wall_share=share)
        for n, share in enumerate(shares)
    ]
    text = report_of(replace(SMALL, stages=stages))
    # AND a name that is too long is shown by its end
    lines = re.findall(r"^stage(\d) .* \.\.\.(x+\.)$", text, re.MULTILINE)
    assert "".join(n for n, _ in lines) == shown
    assert max(map(len, text.splitlines())) == 80


WRAPPED = """
            12       16 pinned,          123k           -      -  12% 640 MiB
                        persistent,
                        out of
                        order,
                        forkserver,
                        batch 1024
            40        2"""


def test_many_options_are_wrapped_and_rows_are_cut():
    much = LoaderConfig(
        num_workers=12, prefetch_factor=16, pin_memory=True, persistent_workers=True,
        in_order=False, multiprocessing_context="forkserver", batch_size=1024,
    )  # fmt: skip
    many = tuple(ran(LoaderConfig(num_workers=n + 1), 100.0 + n, n) for n in range(40))
    result = replace(SMALL, trials=(*TRIED, ran(much, 123456.0, 60), *many))
    text = configurations_of(result)
    assert max(map(len, text.splitlines())) <= 80
    assert WRAPPED in text
    assert max(map(len, configurations_of(result, 90).splitlines())) == 90
    assert "29 more configurations in result.to_dataframe()" in text.splitlines()
    # AND what is marked is never cut
    marks = re.compile(r"^(\w+) +\d+ +[\d-]+ ", re.MULTILINE)
    assert marks.findall(text) == ["equal", "chosen", "before", "failed"]
    # AND of those that failed at most half of the rows are shown
    broken = tuple(ran(LoaderConfig(num_workers=n + 50), FULL, n) for n in range(9))
    text = configurations_of(replace(SMALL, trials=(*TRIED, *many, *broken)))
    assert marks.findall(text).count("failed") == 8
    assert "37 more configurations in result.to_dataframe()" in text.splitlines()


PRINTED = """\
Use 2 workers, prefetch 2, pinned: 1,195 samples/s (1,068 to 1,322). It is 2.99x
faster than your current setting, 0 workers (95% CI 2.80x to 3.20x, 2 A/B
rounds). result.report() shows the table."""


def test_what_prints_is_two_sentences():
    assert str(SMALL) == PRINTED
    assert str(replace(SMALL, found_by="autoloader")).endswith(
        "rounds). loader.report() shows the table."
    )
    assert repr(SMALL) == "<TuningResult complete: 2 workers, prefetch 2, pinned>"


CPU = Finding(kind="cpu", sentence="Bottleneck: CPU.")
SIDES = (
    Side(name="now", config=NONE, measurement=TRIED[0].measurement, bottleneck=CPU),
    Side(name="cached", config=TWO, measurement=TRIED[1].measurement, bottleneck=CPU),
    Side(name="broken", config=ONE, error="user_exception: no such file"),
)
COMPARED = Comparison(
    sides=SIDES, seconds=30.0,
    rounds=tuple(Round(rates={"now": 400.0 + n, "cached": 1200.0 + 2 * n}) for n in range(4)),
)  # fmt: skip
COMPARISON = """\
        samples/s  speedup          95% CI  wait  workers   memory  bottleneck
──────────────────────────────────────────────────────────────────────────────
now           401        1                   12%        0  640 MiB  cpu
cached      1,203    3.00x  2.76x to 3.26x   12%        2  640 MiB  cpu
broken     failed                                       1

broken failed: user_exception: no such file
cached is 3.00x faster than now (95% CI 2.76x to 3.26x, 4 A/B rounds)."""


def test_a_comparison_is_a_table_with_sentences():
    assert COMPARED.report().startswith(COMPARISON)
    assert "cached: Bottleneck: CPU." in COMPARED.report()
    assert str(Answer.NONE()) in Comparison(sides=SIDES[2:]).report()
    alone = Comparison(sides=SIDES[1:], rounds=(Round(rates={"cached": 1200.0}),)).report()
    assert str(Answer.ALONE(name="cached")) in alone
    assert str(COMPARED).endswith("4 A/B rounds). comparison.report() shows the table.")
    with pytest.raises(
        KeyError, match=r"'warm' is not a side. Try one of 'now', 'cached', 'broken'"
    ):
        COMPARED["warm"]
    frame = COMPARED.to_dataframe().set_index("side")
    assert list(frame.index) == ["now", "cached", "broken"]
    assert frame.loc["cached", "ratio"] == pytest.approx(3.0, rel=0.01)
    assert frame.loc["broken", ["rate", "ratio", "wait_share"]].isna().all()
    assert frame.loc["broken", "error"] == "user_exception: no such file"
    assert frame.loc["now", "bottleneck"] == "cpu"


FOUR = LoaderConfig(num_workers=4, prefetch_factor=4)
FAILED = ran(LoaderConfig(num_workers=16), KILLED, 3)
LINES = """\
config [/red] [bold]
trial   3  16 workers, prefetch 2                failed: oom killed  no trial has worked yet  \
60 s left
trial   0  0 workers                             389 samples/s    best 389  55 s left
trial   1  4 workers, prefetch 4                 1,308 samples/s  best 1,308  53 s left
trial   3  16 workers, prefetch 2                failed: oom killed  best 1,308  0 s left
round   1  4 workers, prefetch 4                 1,300 samples/s  fastest of 2  20 s left
round   2  no setting worked
"""
FIRST = ran(NONE, ratio(389.0, 311.2, 466.8), 0)
SECOND = ran(FOUR, ratio(1308.0, 1281.8, 1334.2), 1)
TERMINAL = {"isatty": lambda: True}
Shell = type("TerminalInteractiveShell", (), {})
Kernel = type("ZMQInteractiveShell", (), {})
Colab = type("Shell", (Kernel,), {})


@pytest.mark.parametrize(
    ("asked", "stderr", "shell", "rank", "shown"),
    [
        (None, TERMINAL, Shell, 0, "printed"),
        (None, {}, Shell, 0, "logged"),
        (None, {}, Kernel, 0, "printed"),
        (None, {}, Colab, 0, "printed"),
        (False, TERMINAL, Kernel, 0, "logged"),
        (True, {}, Shell, 0, "printed"),
        (True, TERMINAL, Shell, 1, "nowhere"),
    ],
)
def test_who_gets_the_lines(asked, stderr, shell, rank, shown, monkeypatch, caplog):
    made, printed = shell(), []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: made))
    monkeypatch.setenv("TERM", "xterm")
    # All that a script may put in stderr's place.
    stream = SimpleNamespace(write=printed.append, flush=lambda: None, **stderr)
    with caplog.at_level(logging.INFO, logger="autotune_loader"):
        progress = make_progress(asked, rank=rank, stream=stream)
        progress.announce("config [/red] [bold]")  # square brackets are text
        progress.trial(FAILED, None, 60.0)
        progress.trial(FIRST, FIRST, 55.0)
        progress.trial(SECOND, SECOND, 53.4)
        progress.trial(FAILED, SECOND, -1.0)
        progress.round(1, {FOUR: 1300.0, NONE: 390.0}, 20.0)
        progress.round(2, {}, 20.0)
    assert "".join(printed) == (LINES if shown == "printed" else "")
    logged = [record.message for record in caplog.records]
    assert logged == (LINES.splitlines() if shown == "logged" else [])
