"""Every sentence of `diagnosis.messages`: which case gives it, and that it can be said."""

import inspect
import re
import string
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from diagnosis.test_diagnosis import (
    CASES,
    COPIES,
    IN_MEMORY,
    OF_CUDA,
    OF_LARGE,
    OF_TEN,
    QUEUED,
    READS,
    evidence,
)
from report.example import STAGES, ran

from autotune_loader import AutoLoader, LoaderConfig
from autotune_loader.autoloader import iterator, live
from autotune_loader.autoloader.births import Births
from autotune_loader.diagnosis import Advice, Bottleneck, Caution, Kept, Undecided, diagnose, judge
from autotune_loader.diagnosis.messages import Fact, Table
from autotune_loader.pipeline.forking import ParentProcess
from autotune_loader.tuning.assemble import assembled, choice_of
from autotune_loader.values import Interval
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_result
from tests.support.data import Rows
from tests.support.tuned import simulated_run, simulated_search

ROWS = {f"{table.__name__}.{row.name}": row for table in Table.__subclasses__() for row in table}
# A case of test_diagnosis.py, and the rows that it gives, in order.
BY_DIAGNOSIS = {
    "the CPU": "CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_TRANSFORMS",
    "the CPU beside a step": "CPU CPU_OF_BATCH WAITS SHARED_CORES CHEAPER_TRANSFORMS",
    "the CPU, beside an accelerator": "CPU CPU_OF_BATCH WAITS AT_MOST CHEAPER_TRANSFORMS",
    "all cores in use": "CPU CPU_OF_BATCH CORES WAITS ABOUT CHEAPER_TRANSFORMS",
    "a slow stage": "CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_STAGE",
    "a step that was passed": "CEILING_PASSED CPU CPU_OF_BATCH WAITS MUCH CHEAPER_TRANSFORMS",
    "the step": "STEP WAITS OF_CEILING SPEED_UP_STEP",
    "fetches sleep, and are in time": "STEP WAITS OF_CEILING SPEED_UP_STEP",
    "storage": "STORAGE WAITED WAITS ABOUT LARGER_READS",
    "a stage that waits": "STORAGE WAITED STAGE_WAITS WAITS ABOUT LARGER_READS",
    "a core that is waited for": "CORES FOR_A_CORE WAITS ABOUT FEWER_WORKERS",
    "a core, without workers": "CORES FOR_A_CORE WAITS ABOUT MORE_CORES",
    "no storage": "TRANSFER RECEIVING WAITS ABOUT TRANSFER_LESS AUTOLOADER_TRANSFERS",
    "a step beside other processes": "CPU CPU_OF_BATCH WAITS BUSY ABOUT CHEAPER_TRANSFORMS",
    "transfers": "TRANSFER RECEIVING WAITS ABOUT TRANSFER_LESS AUTOLOADER_TRANSFERS",
    "batches without tensors":
        "TRANSFER RECEIVING_ONE WAITS ABOUT LARGER_BATCHES AUTOLOADER_TRANSFERS",
    "small batches": "TRANSFER RECEIVING WAITS MUCH LARGER_BATCHES AUTOLOADER_TRANSFERS",
    "handing over": "TRANSFER HANDED_OVER PINNING WAITS ABOUT TRANSFER_LESS AUTOLOADER_TRANSFERS",
    "the CPU, before handing over":
        "CPU CPU_OF_BATCH WAITS ABOUT WORKERS_AT_MOST CHEAPER_TRANSFORMS",
    "handing over in time": "CEILING_PASSED CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_TRANSFORMS",
    "handing over, without workers": "CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_TRANSFORMS",
    "a fetch that no clock saw": "CPU CPU_OF_BATCH WAITS CHEAPER_TRANSFORMS",
    "copies, handed over": "COPY COPYING WAITS ABOUT COPY_AHEAD TRANSFER_LESS",
    "copies": "COPY COPYING WAITS ABOUT COPY_AHEAD TRANSFER_LESS",
    "copies ahead": "COPY COPYING WAITS ABOUT TRANSFER_LESS",
    "memory that ran out": "MEMORY RAN_OUT WAITS ABOUT SMALLER_WORKERS",
    "shared memory": "MEMORY RAN_OUT WAITS ABOUT MORE_SHARED_MEMORY",
    "starting epochs": "START_UP WAITS KEEP_WORKERS",
    "in memory": "IN_MEMORY WAITS ABOUT BATCHED_FETCH",
    "in memory, in batches": "IN_MEMORY WAITS ABOUT LEAVE_IT",
    "another loader": "LITTLE LEAVE_IT",
    "too short": "TOO_SHORT",
    "no step": "NO_STEP KEEP_ITERATOR",
    "forked from a process with CUDA":
        "CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_TRANSFORMS FORKED_INITIALIZED "
        "FORKSERVER_BY_AUTOLOADER",
    "the same, by AutoLoader":
        "CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_TRANSFORMS FORKED_INITIALIZED FORKSERVER",
    "forked from a large process":
        "CPU CPU_OF_BATCH WAITS ABOUT CHEAPER_TRANSFORMS FORKED_LARGE FORKSERVER_BY_AUTOLOADER",
    "fetches that no clock saw": "UNCLEAR WAITS OF_CEILING",
    "never waits, yet slow": "UNCLEAR WAITS OF_CEILING",
    "rarely fetches": "UNCLEAR WAITED FETCHES BUSY WAITS OF_CEILING",
    "no core was idle": "UNCLEAR WAITED FETCHES BUSY WAITS OF_CEILING",
}  # fmt: skip
BY_WORDS = {"Caution.STORAGE_LOST": "the search went on in memory"}  # as a test quotes it


def said_of(**changes):
    """The names of the rows that a diagnosis says."""
    said, say = [], Table.__call__

    def noted(row, **figures):
        said.append(row.name)
        return say(row, **figures)

    with mock.patch.object(Table, "__call__", noted):
        diagnose(evidence(**changes))
    return said


@pytest.mark.parametrize(("case", "rows"), BY_DIAGNOSIS.items(), ids=BY_DIAGNOSIS)
def test_a_case_gives_its_rows(case, rows):
    assert said_of(**CASES[case][1]) == rows.split()


NONE, ONE, TWO = (LoaderConfig(num_workers=workers) for workers in range(3))
READING = replace(STAGES[1], wall_s=1.5, cpu_s=0.5)
LESS = ParentProcess(None, (4 << 30) - 1, is_elastic=False)
# A row, what differs, and a figure with which it is said, and with which it is not.
LIMITS = [
    ("KEEP_WORKERS", {}, "starting_share", 0.11, 0.1),
    ("BATCHED_FETCH", OF_TEN, "fetch_s", 0.002, 0.0021),
    ("BATCHED_FETCH", IN_MEMORY, "fetch_cpu_s", 0.0005, 0.00049),
    ("CHEAPER_STAGE", {}, "stages", [replace(READING, cpu_share=0.2)], [READING]),
    ("STAGE_WAITS", READS, "stages", [READING] * 5, [READING] * 6),
    ("STAGE_WAITS", READS, "stages", [READING], [replace(READING, wall_s=0.5)]),
    ("FEWER_WORKERS", QUEUED, "config", TWO, ONE),
    ("TRANSFER_LESS", COPIES, "batch_bytes", 1 << 20, (1 << 20) - 1),
    ("SHARED_CORES", {}, "step_s", 0.0201, 0.02),
    ("FORKED_INITIALIZED", OF_CUDA, "config", ONE, NONE),
    ("FORKED_LARGE", OF_LARGE, "parent", OF_LARGE["parent"], LESS),
    ("SHARED_CORES", {"copy_s": 0.008, "fetch_s": 0.04}, "step_s", 0.029, 0.027),
]


@pytest.mark.parametrize(("row", "changes", "figure", "with_it", "without"), LIMITS)
def test_a_row_has_its_limit(row, changes, figure, with_it, without):
    assert row in said_of(**{**changes, figure: with_it})
    assert row not in said_of(**{**changes, figure: without})


def test_every_row_has_a_case():
    """It is in the table above, or a test names it, or its `kind`."""
    said = {row for rows in BY_DIAGNOSIS.values() for row in rows.split()}
    tables = (Bottleneck, Fact, Advice, Caution)
    given = {name for name, row in ROWS.items() if row.name in said and type(row) in tables}
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = {*re.findall(r"[A-Z]\w+\.[A-Z_]+", tests.replace(Path(__file__).read_text(), ""))}
    own = {name for name, row in ROWS.items() if row in PURE or row in BY_PROCESS}
    quoted = {name for name, row in ROWS.items() if f'"{row.kind}"' in tests}
    words = {name for name, its in BY_WORDS.items() if its in tests and its in ROWS[name].value}
    assert sorted(ROWS.keys() - given - named - own - quoted - words) == []


DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = DOCS.parent / "autotune_loader"


def test_the_page_has_the_codes_order():
    page = (DOCS / "bottleneck.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, flags=re.MULTILINE)
    told = [kind for row in rows for kind in re.findall(r"\w+", row)]
    code = inspect.getsource(judge._row) + inspect.getsource(judge._cpu_or_storage)
    asked = dict.fromkeys(re.findall(r"Bottleneck\.([A-Z_]+)", code))
    assert told == [*(name.lower() for name in asked if name != "UNCLEAR"), "unclear"]


def test_quoted_symptoms_are_what_is_said():
    page = (DOCS / "symptoms.md").read_text()
    quoted = re.findall(r"^\| (`.*?`)(?: \||, or its)", page, flags=re.MULTILINE)
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    said = " ".join(re.sub(r"\{[^{}]*\}|\"\n *f?\"", "", code).split())
    missing = [
        each for row in quoted for each in re.findall("`(.*?)`", row) if is_unsaid(each, said)
    ]
    assert missing == []


def is_unsaid(quote, said):
    """Whether the words of a message without its figures and names stand nowhere."""
    words = re.sub(r"failed: |sample \d+ |train_step |\S+/\S+", "", quote).strip().rstrip(".")
    return words.replace("shared memory", "shared_memory") not in said


BUSY = SimulatedMachine(neighbours=4.0)
LOADED = live.live_of(AutoLoader(range(8)), None, allow_workers=True)


def found_with(*, asked=NONE, wait_share=0.5, **measured):
    """What has been found by a tuner that has measured so much."""
    tuner = SimpleNamespace(
        refused=None, asked=asked, best=asked, is_trying=False, gain=None,
        none_would_be_faster="none_would_be_faster" in measured,
        measured={each: [ran(each, 100.0, wait_share=wait_share).measurement]
                  for each in (asked, *measured.get("others", ()))},
    )  # fmt: skip
    return replace(LOADED.found, tuner=tuner)


def cloneless():
    LOADED.home = SimpleNamespace(why_not="it has a lock")
    LOADED.tell(NONE, "spawn")
    return [LOADED.found.starts_anew]


def daemonic():
    process = SimpleNamespace(daemon=True)
    with mock.patch("multiprocessing.current_process", return_value=process):
        return [live.live_of(AutoLoader(range(8)), None, allow_workers=True).found.kept]


def failing_later():
    """A search of which nothing works any more."""
    clock, machine = FakeClock(), SimulatedMachine()
    search = simulated_search(
        SimulatedProbe(machine, clock), simulated_run(machine), clock, budget_s=8.0
    )
    belief = SimpleNamespace(
        choice=search.belief.choice, trials=search.belief.trials, configs=[], rounds=[]
    )
    return [choice_of(SimpleNamespace(belief=belief, run=search.run, ended=search.ended))[1]]


def kept_workers():
    clock, machine = FakeClock(), SimulatedMachine(worker_start_s=0.2)
    run = simulated_run(machine, own=TWO, epoch_batches=20)
    probe = SimulatedProbe(machine, clock, epoch_batches=20)
    run = replace(run, may_keep_workers=True)
    return assembled(simulated_search(probe, run, clock, budget_s=20.0), 1.0).warnings


PURE = {
    Kept.NOT_WAITING: lambda: [found_with(wait_share=0.01).kept],
    Kept.NOT_FASTER: lambda: [found_with(others=[TWO]).kept],
    Advice.WITHOUT_WORKERS: lambda: found_with(asked=TWO, none_would_be_faster=True).result.advice,
    Caution.STARTS_ANEW: cloneless,
    Kept.DAEMONIC: daemonic,
    Caution.DISTURBED: lambda: simulated_result(BUSY, budget_s=15.0).warnings,
    Caution.WORKERS_KEPT: kept_workers,
    Undecided.FAILS_NOW: failing_later,
}


@pytest.mark.parametrize("row", PURE, ids=str)
def test_what_is_found_gives_its_row(row):
    assert any(map(row.said_by, PURE[row]()))


class Own:
    """A batch that cannot be copied."""

    def __init__(self, items):
        self.items = items

    def __deepcopy__(self, memo):
        raise ValueError("no copy")


BY_PROCESS = {  # what is replaced, and by what
    Kept.NO_GUARD: (iterator, "unguarded_line", lambda: 3, "spawn"),
    Kept.NOT_BEGUN: (
        Births,
        "start",
        mock.Mock(side_effect=TypeError("no pickle")),
        "fork",
    ),
    Kept.NOT_COMPARED: (iterator, "LOOKS", 2, "fork"),
}


@pytest.mark.process
@pytest.mark.parametrize("row", BY_PROCESS, ids=str)
def test_a_loader_without_workers_gives_its_row(row, monkeypatch):
    place, name, value, method = BY_PROCESS[row]
    monkeypatch.setattr(place, name, value)
    data = Rows(lambda index: time.sleep(0.004) or index, 4000)
    loader = AutoLoader(data, batch_size=4, collate_fn=Own, multiprocessing_context=method)
    for _ in loader:
        if loader.found.tuner.refused is not None:
            break
    assert row.said_by(loader.found.kept)


FIGURES = {"share": 0.25, "bytes": 1 << 20, "seconds": 0.02, "number": 1234.5, "": "words"}
RATIO = Interval(value=2.31, low=2.2, high=2.42, count=4)
FIGURES |= {"ratio": RATIO, "confidence": RATIO, ".2f": 2.25, ".1f": 12.8}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_row_can_be_said_with_its_figures(row):
    fields = {name: spec or "" for _, name, spec, _ in string.Formatter().parse(row.value) if name}
    counts = {name: 3 for name, spec in fields.items() if spec.startswith("# ")}
    known = {name: FIGURES[spec] for name, spec in fields.items() if name not in counts}
    finding = row(**counts, **known)
    assert finding.kind == row.name.lower()
    assert row.said_by(finding)
    assert not re.search(r"[{}\n]|  ", finding.sentence)
    assert finding.sentence[-1] in ".:)" or row.value.endswith("}")
    if fields:
        with pytest.raises(KeyError):
            row()
