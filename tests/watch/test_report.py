"""What a script's report says: what its loops show, the command that may pay, a block as drawn."""

import copy
import json
import os
import re
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from report.example import ran

from autotune_loader import TuningResult, __version__
from autotune_loader.autoloader.live import Found
from autotune_loader.autoloader.tuner import Tuner
from autotune_loader.diagnosis import Account, Advice, Bottleneck, Caution, Job, Kept, loops
from autotune_loader.lines import Line
from autotune_loader.machine.processes import CpuTimes
from autotune_loader.pipeline.forking import ParentProcess
from autotune_loader.pipeline.loop_log import Site, Totals
from autotune_loader.report.script import LoaderReport, ScriptReport
from autotune_loader.values import Interval, LoaderConfig
from autotune_loader.watch import report
from autotune_loader.watch.others import gathered, leave
from autotune_loader.watch.run_plan import Plan
from autotune_loader.watch.session import Session
from autotune_loader.watch.watched import ScriptLoader

SITE = Site(line=Line("/x/train.py", 15), dataset="Images", batch_size=8, is_shuffled=True)


def loader_of(workers=0, *, loop_cpu_s=0.001, queued_s=0.0, busy_s=5.0, **totals):
    """500 batches of 8 in 10 s; the loop waits 41%, a fetch takes 8.2 ms, 1 ms of it of CPU."""
    known = ScriptLoader(SITE, "train.py:15", LoaderConfig(num_workers=workers), lambda _: None)
    figures = {"epochs": 1, "batches": 500, "samples": 4000, "started_s": 0.01}
    figures |= {"waited_s": 4.1, "stepped_s": 5.9, **totals}
    known.log.totals = Totals(asking_s=figures["waited_s"], **figures)
    for clocked, cpu_s in ((known.in_loop, loop_cpu_s), (known.in_workers, 0.001)):
        clocked.add(1, CpuTimes(0.0, 0.0), CpuTimes(cpu_s, queued_s))
    known.read_s, known.busy_s = 10.0, busy_s
    return known


def seen_of(monkeypatch, *loaders, cores=4, script="train.py", verb="watch"):
    monkeypatch.setattr(report, "usable_cores", lambda: SimpleNamespace(usable=cores))
    session = Session(Plan(verb=verb, script=script))
    session.loaders += loaders
    return report.seen_of(session)


def evidence_of(known):
    job = Job(active_s=20.0, cores=4, on_accelerator=False, to_tune="", to_allow="", is_tuned=False)
    return loops.evidence_of(known, loops.fetching_of(known), job)


RUN_WITH_WORKERS, RUN = Advice.RUN_WITH_WORKERS.kind, Advice.RUN.kind
COMMANDS = {RUN_WITH_WORKERS: "run --allow-workers train.py`", RUN: "run train.py`"}


def commands_in(found):
    """The kinds of advice that name a command."""
    named = [each for each in found.advice if each.kind in COMMANDS]
    for each in named:
        assert f"`autotune-loader {COMMANDS[each.kind]}" in each.sentence
    return [each.kind for each in named]


QUEUED_IN_WORKERS = loader_of(2, queued_s=0.039, busy_s=39.0)
WAITS = (4, Bottleneck.STORAGE, RUN_WITH_WORKERS)


@pytest.mark.parametrize(
    ("known", "cores", "bottleneck", "command"),
    [
        (loader_of(), *WAITS),
        (loader_of(), 1, *WAITS[1:]),
        (loader_of(loop_cpu_s=0.008), 2, Bottleneck.CPU, RUN_WITH_WORKERS),
        (loader_of(loop_cpu_s=0.008), 1, Bottleneck.CPU, None),  # workers compute, too
        (loader_of(2), 4, Bottleneck.STORAGE, RUN),
        (QUEUED_IN_WORKERS, 4, Bottleneck.CORES, None),
        (loader_of(loop_cpu_s=0.002, queued_s=0.005), 4, Bottleneck.CORES, None),
        (loader_of(2, loop_cpu_s=0.008), 4, Bottleneck.TRANSFER, RUN),
        (loader_of(waited_s=0.04), 4, Bottleneck.STEP, None),
        (loader_of(batches=2), 4, Bottleneck.TOO_SHORT, None),
        (loader_of(started_s=2.5, epochs=10), 4, Bottleneck.START_UP, None),
        (loader_of(started_s=1.5, epochs=10), *WAITS),
    ],
)
def test_a_command_is_named_where_it_could_pay(monkeypatch, known, cores, bottleneck, command):
    (found,) = seen_of(monkeypatch, known, cores=cores).report.loaders
    assert bottleneck.said_by(found.bottleneck), found.bottleneck
    assert commands_in(found) == ([command] if command else [])


@pytest.mark.parametrize(
    ("workers", "kept", "command"),
    [(0, Kept.NO_CONSENT(), RUN_WITH_WORKERS), (0, Kept.ITERABLE(), None), (2, None, None)],
)
def test_run_names_a_command_that_may_do_more(monkeypatch, workers, kept, command):
    known = loader_of(workers)
    known.kept = kept
    (found,) = seen_of(monkeypatch, known, verb="run").report.loaders
    assert commands_in(found) == ([command] if command else [])


@pytest.mark.parametrize(
    ("figures", "is_told"), [({}, True), ({"batches": 2}, False), ({"stepped_s": 0.0}, False)]
)
def test_a_rate_needs_three_batches_and_a_step(monkeypatch, figures, is_told):
    (found,) = seen_of(monkeypatch, loader_of(**{"batches": 3, **figures})).report.loaders
    assert (found.samples_per_s is not None) == is_told


@pytest.mark.parametrize(("last", "told"), [(7, None), (8, "2 of 4 workers")])
def test_a_worker_is_idle_once_all_had_turns(monkeypatch, last, told):
    known = loader_of(4)
    known.delivered.update({0: 8, 1: last})
    (found,) = seen_of(monkeypatch, known).report.loaders
    assert found.idle_workers == (Caution.IDLE_WORKERS(idle=2, workers=4) if told else None)
    assert (Advice.SPREAD_SHARDS(busy=2) in found.advice) == bool(told)
    assert found.delivered == (8, last, 0, 0)
    # AND none is where all deliver
    known.delivered.update({2: 8, 3: 8})
    (found,) = seen_of(monkeypatch, known).report.loaders
    assert found.idle_workers is None


@pytest.mark.parametrize(
    ("workers", "queued_s", "expected"),
    [
        (0, 0.002, {"fetch_s": 4.1 / 500 - 0.002, "receive_s": None, "receive_queued_s": 0.0}),
        (0, 0.0, {"fetch_s": 4.1 / 500, "fetch_queued_s": 0.0}),
        (2, 0.01, {"fetch_s": 2 * 10 / 500 - 0.01, "receive_s": 0.001, "receive_queued_s": 0.01}),
        (2, 0.04, {"fetch_s": 0.001, "fetch_queued_s": 0.04}),
    ],
)
def test_evidence_is_of_one_batch(monkeypatch, workers, queued_s, expected):
    monkeypatch.setattr(report, "usable_cores", lambda: SimpleNamespace(usable=4))
    found = asdict(evidence_of(loader_of(workers, queued_s=queued_s)))
    expected |= {"samples_per_s": 400, "batch_size": 8, "step_s": 5.9 / 500, "batch_bytes": 0}
    expected |= {"cpu_share": 5 / (4 * 10), "fetch_cpu_s": 0.001, "loader_share": 4.1 / 20}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("workers", "unknown"), [(0, ("fetch_s", "fetch_cpu_s", "fetch_queued_s")), (2, ("receive_s",))]
)
def test_what_was_not_clocked_is_not_known(workers, unknown):
    known = loader_of(workers)
    known.in_loop.batches = 0.0
    found = asdict(evidence_of(known))
    assert {name: found[name] for name in unknown} == dict.fromkeys(unknown)
    assert found["receive_queued_s"] == 0.0


def test_a_fork_is_told_beside_the_next_step(monkeypatch):
    known = loader_of(2)
    known.log.parent = ParentProcess("cuda", 1 << 30, is_elastic=False)
    (found,) = seen_of(monkeypatch, known).report.loaders
    lines = str(found).splitlines()
    assert [each for each in lines if "forked after" in each or "next:" in each] == [
        "  Workers are forked after this process initialized CUDA: they may crash or",
        "  next: `autotune-loader run train.py` tries more workers; larger reads (tar",
    ]
    assert Advice.FORKSERVER_BY_AUTOLOADER.said_by(found.advice[-1])


def test_gpu_use_is_said_where_nvml_tells(monkeypatch):
    known = loader_of(2)
    (without,) = seen_of(monkeypatch, known).report.loaders
    known.gpu_s, known.gpu_busy_s = 8.0, 5.12
    (found,) = seen_of(monkeypatch, known).report.loaders
    assert without.gpu_utilization is None
    assert found.gpu_utilization == pytest.approx(0.64)
    assert "GPU" not in str(without)
    assert "GPU 64% busy (NVML)" in " ".join(str(found).split())


def test_a_wait_above_what_is_allowed_is_told(monkeypatch):
    seen = seen_of(monkeypatch, loader_of())
    told = seen.too_long(Plan(verb="watch", most_waiting=0.4))
    assert told == Caution.WAITS_TOO_LONG(name="train.py:15", share=0.41, most=0.4)
    assert seen.too_long(Plan(verb="watch", most_waiting=0.41)) is None
    assert seen.too_long(Plan(verb="watch")) is None
    of_rank = replace(seen, rank=1).too_long(Plan(verb="watch", most_waiting=0.4))
    assert "15 of rank 1: " in of_rank.sentence


def test_what_a_process_leaves_is_gathered_once(monkeypatch, capsys, tmp_path):
    seen, folder = seen_of(monkeypatch, loader_of()), tmp_path / "left"
    report.tell([seen], Plan(verb="watch", pid=os.getppid(), folder=str(folder)))
    assert capsys.readouterr().err == ""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert gathered(str(folder)) == [seen]
    assert not folder.exists()
    assert gathered(str(folder)) == []
    assert not leave(seen, "/dev/null/left")


def test_what_is_asked_for_is_written(monkeypatch, capsys, tmp_path):
    file = tmp_path / "loader.json"
    seen = seen_of(monkeypatch, loader_of(waited_s=4.12345))
    report.tell([seen], Plan(verb="watch", output=str(file), report=str(tmp_path)))
    told = capsys.readouterr().err
    assert f"\nWritten to {file}.\n" in told
    assert f"\n{tmp_path} was not written: [Errno" in told
    assert TuningResult.load(file).seconds == 10.023
    assert 0.0 <= seen.report.seconds < 60.0  # since the session began


def test_a_script_that_watches_itself_gets_a_call(monkeypatch):
    (found,) = seen_of(monkeypatch, loader_of(), script=None).report.loaders
    assert str(found.advice[0]).startswith(
        '`enable("run", allow_workers=True)` tries worker processes'
    )


def test_figures_are_of_the_settings_that_are_told(monkeypatch):
    known, eight = loader_of(), LoaderConfig(num_workers=8)
    tuner = Tuner(known.log, known.own, cores=4, max_workers=32)
    known.kept = Kept.ITERABLE()  # as long as nothing tuned it
    known.tune_by(Found(site=SITE, log=known.log, tuner=tuner, has_batched_fetch=True))
    rates = {known.own: 47.0, eight: 690.0}
    tuner.measured = {each: [ran(each, rate).measurement] for each, rate in rates.items()}
    tuner.is_trying = True
    seen = seen_of(monkeypatch, known)
    (told,), result = seen.report.loaders, seen.result
    assert (told.samples_per_s, told.wait_share) == (47.0, 0.125)
    assert told.settings_now["num_workers"] == 0
    assert told.kept == known.found.kept
    assert (result.rate.value, result.wait_share, result.status) == (47.0, 0.125, "partial")
    assert result.bottleneck == told.bottleneck == known.found.result.bottleneck
    assert (
        "Fastest trial so far: 8 workers, prefetch 2, 14.7x faster than 0 workers."
        in result.report()
    )
    # AND what was gained is told once they have changed
    tuner.is_trying, tuner.gain = False, Interval(value=14.7, low=14.0, high=15.0, count=9)
    for best, gain in ((known.own, None), (eight, tuner.gain)):
        tuner.best = best
        (told,) = seen_of(monkeypatch, known).report.loaders
        assert told.speedup == gain
        assert told.settings_now["num_workers"] == best.num_workers


def test_a_loader_that_takes_little_comes_last(monkeypatch):
    little = loader_of(batches=10, samples=80, waited_s=0.08, stepped_s=0.01)
    main, other = seen_of(monkeypatch, little, loader_of()).report.loaders
    assert (main.batches, other.batches) == (500, 10)
    assert Bottleneck.LITTLE.said_by(other.bottleneck)
    assert other.advice[0].kind == Advice.LEAVE_IT.kind
    assert other.samples_per_s == pytest.approx(80 / 0.09)


@pytest.mark.parametrize(
    ("rank", "ranks", "end"), [(0, 1, "allows 40%.\n"), (0, 2, "of rank 0 of 2.\n"), (1, 2, "")]
)
def test_rank_0_tells_and_says_of_how_many(rank, ranks, end, monkeypatch, capsys):
    seen = replace(seen_of(monkeypatch, loader_of()), rank=rank, ranks=ranks)
    report.tell([seen, copy.deepcopy(seen)], Plan(verb="watch", most_waiting=0.4))
    told = capsys.readouterr().err
    assert told.count("--fail-if-wait") == (rank == 0)
    assert told.endswith(end)
    assert bool(told) == (rank == 0)
    (loader,) = report.report_of([seen, copy.deepcopy(seen), copy.deepcopy(seen)]).loaders
    assert loader.processes == 3


CHANGED = LoaderReport(
    name="train.py:41", contents="Images[1200], batches of 32, shuffled", epochs=5, batches=190,
    samples_per_s=212.3, time=Account(step=53.0, computing=6.0, storage=1.0, evaluation=0.2),
    wait_share=0.12, settings={"num_workers": 0, "pin_memory": False},
    settings_now={"num_workers": 2, "pin_memory": False, "prefetch_factor": 4},
    speedup=Interval(value=1.83, low=1.75, high=1.92, count=40), bottleneck=Bottleneck.CPU(),
    advice=(Advice.LEAVE_IT(), Advice.SPEED_UP_STEP()),
)  # fmt: skip
KEPT = LoaderReport(
    name="train.py:47", contents="Images[200], batches of 32", epochs=1, batches=7,
    samples_per_s=None, time=Account(computing=1.0), wait_share=None,
    settings={"num_workers": 0}, settings_now={"num_workers": 0}, kept=Kept.ITERABLE(),
    bottleneck=Bottleneck.UNCLEAR(),
)  # fmt: skip
DRAWN = f"""\
autotune-loader run: 2 loaders in 61 s

train.py:41  Images[1200], batches of 32, shuffled
  seconds per epoch, all settings: step 11 s, computing 1.20 s, storage 200 ms
  190 batches in 5 epochs, now 212 samples/s, waits for data 12% of the time
  settings: num_workers=0
  now: num_workers=2, prefetch_factor=4: 1.83x faster (95% CI 1.75x to 1.92x)
  Bottleneck: CPU.
  next: Leave the loader as it is.

train.py:47  Images[200], batches of 32
  7 batches
  settings: num_workers=0
  not changed: {Kept.ITERABLE()}
  Bottleneck: unclear.

Written to loader.json."""


def test_a_report_is_drawn():
    notes = ("Written to loader.json.",)
    found = ScriptReport(verb="run", seconds=61.0, loaders=(CHANGED, KEPT), notes=notes)
    assert str(found) == DRAWN


def test_hundreds_of_loaders_can_be_read():
    text = str(ScriptReport(verb="watch", seconds=61.0, loaders=(CHANGED,) * 100))
    assert len(text.splitlines()) < 120
    assert text.endswith("88 loaders more, each with less time; use --json FILE for all of them.")


def test_each_key_of_the_file_is_documented(tmp_path):
    ScriptReport(verb="run", seconds=61.0, loaders=(CHANGED, KEPT)).save(tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    page = Path(__file__).parents[2] / "docs" / "watch.md"
    rows = re.findall(
        r"^\| (`.*?) \|", page.read_text().partition("## report.json")[2], re.MULTILINE
    )
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {*written, *written["loaders"][0]}
    assert datetime.fromisoformat(written["date"]).utcoffset() == timedelta(0)
    assert (written["version"], written["host"]) == (__version__, os.uname().nodename)
