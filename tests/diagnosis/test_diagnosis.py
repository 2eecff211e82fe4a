"""Each bottleneck from figures that show it, with the advice that follows: one table of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report.example import exactly, ran

from autotune_loader.diagnosis import Evidence, diagnose
from autotune_loader.diagnosis.ranking import ranking
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.stages import StageTime
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace

FOUR, SIX, TWELVE = (LoaderConfig(num_workers=workers) for workers in (4, 6, 12))
KEPT = replace(FOUR, persistent_workers=True)


def evidence(**changes):
    """A loader limited by the CPU: 100 ms of CPU per batch in a worker, and a loop that waits half of its time."""
    values = {
        "config": FOUR, "samples_per_s": 1000.0, "wait_share": 0.5, "cores": 4, "batch_size": 32.0, "step_s": 0.015,
        "fetch_s": 0.11, "fetch_cpu_s": 0.10, "receive_s": 0.001, "batch_bytes": 4 << 20, "ceiling": exactly(2000.0),
        "has_batched_fetch": False, **changes,
    }  # fmt: skip
    return Evidence(**values)


def failed(kind, config=SIX):
    return ran(config, Failure(kind=kind, phase="batches", message="no room"))


def stage(name, wall_s, cpu_s):
    where = f"a.py:{len(name)}, {name}"
    return StageTime(
        stage=name, where=where, wall_share=wall_s / 0.006, cpu_share=cpu_s / 0.003, wall_s=wall_s, cpu_s=cpu_s
    )


READ, DECODE = stage("read", 3e-3, 0.3e-3), stage("decode", 1.8e-3, 1.8e-3)
READS = {"fetch_cpu_s": 0.01}
IN_MEMORY = {
    "config": LoaderConfig(), "batch_size": 64.0, "fetch_s": 0.001, "fetch_cpu_s": 0.001, "step_s": 0.0001,
    "samples_per_s": 58_000.0, "ceiling": exactly(640_000.0),
}  # fmt: skip
SMALL = {
    "batch_bytes": 800, "receive_s": 0.0004, "fetch_s": 0.0002, "fetch_cpu_s": 0.0002, "wait_share": 0.9,
    "samples_per_s": 6e4, "ceiling": None,
}  # fmt: skip
RARELY = {"wait_share": 0.12, "fetch_s": 0.004, "fetch_cpu_s": 0.003, "cpu_share": 0.27, "foreign_cpu_share": 0.7}
NOT_MISSED = {"trials": (ran(SIX, 1010.0), failed("oom_killed", TWELVE))}
ASLEEP_IN_TIME = {"wait_share": 0.04, "fetch_cpu_s": 0.01, "cpu_share": 0.3, "ceiling": exactly(1090.0)}
NO_IDLE_CORE = {"fetch_cpu_s": 0.04, "cpu_share": 0.45, "foreign_cpu_share": 0.5}

# Kind, what differs from a loader limited by the CPU, words of the bottleneck, words of some advice (None: no advice).
CASES = {
    "the CPU": ("cpu", {}, "100 ms of CPU to fetch and 15 ms of step", "Make transforms cheaper"),
    "the CPU beside a step": ("cpu", {"wait_share": 0.01, "step_s": 0.03}, "30 ms of step", ""),
    "all cores in use": ("cpu", {"cpu_share": 0.97}, "97 % of 4 cores are in use.", ""),
    "a slow stage": ("cpu", {"stages": (READ, DECODE)}, "", "Make decode cheaper (a.py:6, decode): smaller source"),
    "what failed otherwise": ("cpu", {"trials": (failed("user_exception"),)}, "", ""),
    "a step that was passed": ("cpu", {"ceiling": exactly(800.0)}, "at most 2.00x as fast", ""),
    "memory that was not missed": ("cpu", NOT_MISSED, "", ""),
    "the step": ("step", {"wait_share": 0.02, "ceiling": exactly(1020.0)},
        "waits for data 2 % of the time. That is 1,000/s of the 1,020/s", "Speed up the step"),
    "without a ceiling": ("step", {"wait_share": 0.01, "ceiling": None}, "waits for data 1 % of the time.", ""),
    "fetches sleep, and are in time": ("step", ASLEEP_IN_TIME, "4 % of the time", ""),
    "storage": ("storage", READS, "Of 110 ms per batch, a fetch computes for 10 ms.", "Read larger pieces (tar"),
    "a stage that waits": ("storage", {**READS, "stages": (READ, DECODE)},
        "read takes 100 % of a worker's waiting (a.py:4, read).", "Read larger pieces"),
    "handing over": ("hand_over", {"receive_s": 0.02}, "Receiving a batch of 4 MiB takes 20 ms.", "uint8"),
    "small batches": ("hand_over", SMALL, "90 % of the time", "Hand over less often"),
    "memory that ran out": ("memory", {"trials": (failed("oom_killed"),)},
        "6 workers, prefetch 2 ran out of it (oom killed).", "Make a worker smaller"),
    "shared memory": ("memory", {"trials": (failed("shared_memory"),)}, "", "--shm-size"),
    "starting epochs": ("start_up", {"starting_share": 0.2}, "takes 20 %", "persistent_workers=True"),
    "workers that are kept": ("start_up", {"starting_share": 0.2, "config": KEPT}, "", None),
    "in memory": ("in_memory", IN_MEMORY, "takes 1 ms, so no worker is needed", "__getitems__"),
    "in memory, in batches": ("in_memory", {**IN_MEMORY, "has_batched_fetch": True}, "", None),
    "another loader": ("little", {"loader_share": 0.01}, "This loader is 1 % of the time", "Leave the loader as it is."),
    "too short": ("too_short", {"batches": 1}, "1 batch: too few", None),
    "no step": ("no_step", {"wait_share": None}, "left after its first batch", "iter(loader) once"),
    # Two witnesses that disagree: both are named, and nothing is concluded.
    "rarely fetches": ("unclear", RARELY, "fetches for 3 % of its time. Other processes kept 70 % of the cores busy.", None),
    "never waits, yet slow": ("unclear", {"wait_share": 0.01, "cpu_share": 0.2}, "That is 1,000/s of the 2,000/s", None),
    "neighbours": ("unclear", {"wait_share": 0.01, "foreign_cpu_share": 0.5}, "kept 50 % of the cores busy", None),
    "no core was idle": ("unclear", NO_IDLE_CORE, "computes for 40 ms.", None),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "words", "advised"), CASES.values(), ids=CASES)
def test_a_bottleneck_is_named_with_its_figures_and_advice_follows(kind, changes, words, advised):
    bottleneck, advice = diagnose(evidence(**changes))
    assert bottleneck.kind == kind
    assert words in bottleneck.sentence
    assert advice == () if advised is None else advised in "\n".join(advice)


def test_without_a_ceiling_the_loops_own_waiting_bounds_what_a_loader_can_bring():
    found, _ = diagnose(evidence(ceiling=None, wait_share=0.41))
    assert found.gain == pytest.approx(0.41 / 0.59)
    assert "at most 1.69x as fast" in found.sentence


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_row_counts_the_rounds_that_its_side_ran_in_and_not_its_batches(rounds):
    sides = ran(LoaderConfig(), 200.0), ran(FOUR, 1000.0)
    trials = tuple(replace(each, number=number, round=number) for number in range(rounds) for each in sides)
    rates = {"rate": exactly(1000.0), "baseline_rate": exactly(200.0)}
    found = TuningResult(best=FOUR, status="undecided", trials=trials, **rates)
    assert [row.rate.count for row in ranking(found) if row.rate] == [rounds, rounds]


def test_the_evidence_of_a_burst_is_its_means_and_what_its_batches_show():
    # GIVEN a burst whose batches the loop fetched itself, so that none lay ready, and epochs of 100 batches of 32 ms
    ends = dict.fromkeys(("fetch_end", "collate_end", "cpu_s", "received", "step_end"), 0.1)
    batch = BatchTrace(worker=MAIN_PROCESS, fetch_start=0.0, requested=0.0, samples=32, **ends)
    burst = ran(FOUR, 1000.0, traces=(batch,) * 50, first_batch_s=0.88, receive_s=0.1).measurement
    found = Evidence.of(burst, config=FOUR, cores=4, wait_share=0.3, epoch_batches=100)
    assert (found.samples_per_s, found.fetch_s, found.wait_share, found.receive_s) == (1000.0, 0.08, 0.3, 0.0)
    assert found.starting_share == pytest.approx(0.8 / (0.8 + 3.2))
    assert Evidence.of(burst, config=KEPT, cores=4, epoch_batches=100).starting_share == 0.0
