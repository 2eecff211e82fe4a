"""Each bottleneck from figures that show it, with the advice that follows: one table of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.diagnosis import Evidence, diagnose
from autotune_loader.diagnosis.ranking import ranking
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from autotune_loader.values.trial import Trial

FOUR, SIX, TWELVE = (LoaderConfig(num_workers=workers) for workers in (4, 6, 12))


def exactly(value):
    return Interval(value=value, low=value, high=value, count=20)


def evidence(**changes):
    """A loader limited by the CPU: 100 ms of CPU per batch in a worker, and a loop that waits half of its time."""
    values = {
        "config": FOUR, "samples_per_s": 1000.0, "wait_share": 0.5, "cores": 4, "batch_size": 32.0, "step_s": 0.015,
        "fetch_s": 0.11, "fetch_cpu_s": 0.10, "receive_s": 0.001, "first_batch_s": 0.2, "batch_bytes": 4 << 20,
        "ceiling": exactly(2000.0), "epoch_batches": 10_000, "has_batched_fetch": False, **changes,
    }  # fmt: skip
    return Evidence(**values)


def trial(config=FOUR, rate=1000.0, kind=None, **changes):
    if kind is not None:
        return Trial(number=0, config=config, failure=Failure(kind=kind, phase="batches", message="no room"))
    values = {
        "samples_per_s": exactly(rate), "samples": 1000, "window_s": 1.0, "batch_size": 32.0, "first_batch_s": 0.2,
        "wait_share": 0.5, "service_s": 0.11, "service_cpu_s": 0.10, "receive_s": 0.001, "step_s": 0.015, **changes,
    }  # fmt: skip
    return Trial(number=0, config=config, measurement=Measurement(**values))


READ = StageTime(stage="read", where="a.py:1, open", wall_share=0.5, cpu_share=0.1, wall_s=3e-3, cpu_s=0.3e-3)
DECODE = StageTime(stage="decode", where="a.py:2, convert", wall_share=0.4, cpu_share=0.6, wall_s=1.8e-3, cpu_s=1.8e-3)
CROP = StageTime(stage="crop", where="a.py:3", wall_share=0.1, cpu_share=0.3, wall_s=0.9e-3, cpu_s=0.9e-3)
SLEEPS = {"wait_share": 0.08, "fetch_cpu_s": 0.01, "cpu_share": 0.3}
READS = {"fetch_cpu_s": 0.01}
ALONE = trial(LoaderConfig(), 200.0, service_cpu_s=0.01)
IN_MEMORY = {
    "config": LoaderConfig(), "batch_size": 64.0, "fetch_s": 0.001, "fetch_cpu_s": 0.001, "step_s": 0.0001,
    "samples_per_s": 58_000.0, "ceiling": exactly(640_000.0), "collate_share": 0.1,
}  # fmt: skip
TOY = {
    "batch_bytes": 800, "receive_s": 0.0004, "fetch_s": 0.0002, "fetch_cpu_s": 0.0002, "wait_share": 0.9,
    "samples_per_s": 6e4, "ceiling": exactly(1.4e6),
}  # fmt: skip
RARELY = {
    "wait_share": 0.12, "fetch_s": 0.004, "fetch_cpu_s": 0.003, "batch_bytes": 4000, "cpu_share": 0.27,
    "foreign_cpu_share": 0.7,
}  # fmt: skip

# Kind, the evidence, words of the bottleneck, words of some advice (None: no advice at all).
CASES = {
    "the CPU": ("cpu", evidence(), "100 ms of CPU to fetch and 15 ms of step", "transforms cheaper"),
    "the CPU beside a step": ("cpu", evidence(wait_share=0.01, step_s=0.03), "30 ms of step", ""),
    "all cores in use": ("cpu", evidence(cpu_share=0.97), "There are 4 cores, 97 % in use.", "more cores: all 4 cores"),
    "a step short of cores": ("cpu", evidence(cpu_share=0.97, step_s=0.03), "", "torch.set_num_threads(2)"),
    "threads of a library": ("cpu", evidence(fetch_cpu_s=0.25), "", "a worker keeps 2.3 cores busy"),
    "a slow stage": ("cpu", evidence(stages=(READ, DECODE, CROP)),
        "decode takes 60 % of a worker's CPU (a.py:2, convert).", "Make decode cheaper (a.py:2, convert): smaller source"),
    "a heavy tail": ("cpu", evidence(slow_times=10.0), "", "take 10 times the median"),
    "what failed otherwise": ("cpu", evidence(trials=(trial(SIX, kind="user_exception"),)), "", ""),
    "workers are kept": ("cpu",
        evidence(first_batch_s=5.0, epoch_batches=100, config=LoaderConfig(num_workers=4, persistent_workers=True)), "", ""),
    "the step": ("step", evidence(wait_share=0.02, ceiling=exactly(1020.0)),
        "waits for data 2 % of the time. That is 1,000/s of the 1,020/s", "Speed up the step"),
    "the step without a ceiling": ("step", evidence(wait_share=0.01, ceiling=None), "waits for data 1 % of the time.", ""),
    "fetches sleep, and are in time": ("step", evidence(**SLEEPS, ceiling=exactly(1090.0)), "8 % of the time", ""),
    "storage": ("storage", evidence(**READS),
        "Of 110 ms per batch, a fetch computes for 10 ms.", "Read larger pieces"),
    "a stage that waits": ("storage", evidence(**READS, stages=(READ, DECODE)),
        "read takes 100 % of a worker's waiting (a.py:1, open).", "a fetch waits 91 % of its time. read takes"),
    "the most workers allowed": ("storage", evidence(**READS, max_workers=4, trials=(ALONE,)),
        "", "max_workers=8: a fetch waits 91 %"),
    "handing over": ("hand_over", evidence(receive_s=0.02), "Receiving a batch of 4 MiB takes 20 ms.", "uint8"),
    "a toy": ("hand_over", evidence(**TOY), "The step takes next to no time", "Hand over less often"),
    "many tensors": ("hand_over", evidence(receive_s=0.02, batch_tensors=20), "", "a batch has 20 tensors"),
    "memory that ran out": ("memory", evidence(trials=(trial(SIX, kind="oom_killed"),)),
        "6 workers, prefetch 2 ran out of it (oom killed).", "Make a worker smaller"),
    "shared memory": ("memory", evidence(trials=(trial(SIX, kind="shared_memory"),)), "", "--shm-size"),
    "memory that was not missed": ("cpu", evidence(trials=(trial(SIX, 1010.0), trial(TWELVE, kind="oom_killed"))), "", ""),
    "starting epochs": ("start_up", evidence(first_batch_s=5.0, epoch_batches=100), "takes 60 %", "persistent_workers"),
    "starts that were clocked": ("start_up", evidence(starting_share=0.2), "takes 20 %", "persistent_workers=True"),
    "in memory": ("in_memory", evidence(**IN_MEMORY), "no worker is needed", "__getitems__"),
    "in memory, in batches": ("in_memory", evidence(**{**IN_MEMORY, "has_batched_fetch": True}), "1 ms, so no worker", None),
    "another loader": ("little", evidence(loader_share=0.01), "This loader is 1 % of the time", "Leave the loader as it is."),
    "too short": ("too_short", evidence(batches=1), "1 batch: too few", None),
    "no step": ("no_step", evidence(wait_share=None), "left after its first batch", "iter(loader) once"),
    # Two witnesses that disagree: both are named, and nothing is concluded.
    "rarely fetches": ("unclear", evidence(**RARELY),
        "fetches for only 3 % of its time. Other processes kept 70 % of the cores busy.", None),
    "slowed by something": ("unclear", evidence(**SLEEPS, ceiling=exactly(1105.0)), "That is 1,000/s of the 1,105/s", None),
    "never waits, yet slow": ("unclear", evidence(wait_share=0.01, cpu_share=0.2), "That is 1,000/s of the 2,000/s", None),
    "neighbours": ("unclear", evidence(wait_share=0.01, foreign_cpu_share=0.5), "kept 50 % of the cores busy", None),
    "waits at the ceiling": ("unclear", evidence(ceiling=exactly(1020.0)), "50 % of the time. That is 1,000/s", None),
    "no core was idle": ("unclear", evidence(fetch_cpu_s=0.04, cpu_share=0.45, foreign_cpu_share=0.5),
        "computes for 40 ms. No core was idle meanwhile", None),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "found", "words", "advised"), CASES.values(), ids=CASES)
def test_a_bottleneck_is_named_with_its_figures_and_advice_follows(kind, found, words, advised):
    diagnosis = diagnose(found)
    assert diagnosis.bottleneck.kind == kind
    assert words in diagnosis.bottleneck.sentence
    assert diagnosis.advice == () if advised is None else advised in "\n".join(map(str, diagnosis.advice))
    # AND nothing promises more than a loader without any cost would bring, except where starts of epochs are the matter.
    for each in diagnosis.advice:
        assert each.gain is None or each.gain > 0
        assert kind == "start_up" or (each.gain or 0.0) <= (found.headroom or 0.0) + 1e-9


@pytest.mark.parametrize(
    ("found", "words", "gain"),
    [
        (evidence(first_batch_s=3.31, epoch_batches=300), "persistent_workers", 1 / 3),  # 3.2 s of 9.6 s
        (evidence(**IN_MEMORY), "__getitems__", 1.1035 / (1.1035 - 0.75) - 1),  # 0.75 ms of 1.1 ms can go
        (evidence(stages=(DECODE,), ceiling=exactly(9000.0)), "decode", 0.115 / (0.115 - 0.0288) - 1),  # half of 58 ms
        (evidence(), "transforms", 0.115 / (0.115 - 0.05) - 1),
        (evidence(**READS, ceiling=exactly(1100.0)), "larger pieces", 0.1),  # no more than the step allows
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gain_is_what_the_measured_cost_says_at_most(found, words, gain):
    advice = next(each for each in diagnose(found).advice if words in each.sentence)
    assert advice.gain == pytest.approx(gain, rel=0.05)


def test_without_a_ceiling_the_loops_own_waiting_bounds_what_a_loader_can_bring():
    found = diagnose(evidence(ceiling=None, wait_share=0.41)).bottleneck
    assert found.gain == pytest.approx(0.41 / 0.59)
    assert "at most 1.69x as fast" in found.sentence


def test_a_ceiling_that_was_passed_is_none():
    found = diagnose(evidence(ceiling=exactly(800.0))).bottleneck
    assert found == diagnose(evidence(ceiling=None)).bottleneck


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_row_counts_the_rounds_that_its_side_ran_in(rounds):
    # GIVEN rates whose intervals rest on 20 batches each
    own, best = trial(LoaderConfig(), 200.0), trial(FOUR, 1000.0)
    trials = [replace(each, number=i, round=i) for i in range(rounds) for each in (own, best)]
    found = TuningResult(
        best=FOUR, status="undecided", rate=exactly(1000.0), baseline_rate=exactly(200.0), trials=tuple(trials)
    )
    assert [row.rate.count for row in ranking(found) if row.rate] == [rounds, rounds]


@pytest.mark.parametrize("config", [LoaderConfig(), LoaderConfig(num_workers=2), FOUR], ids=str)
def test_no_advice_names_a_number_of_workers_that_was_measured_to_be_slower(config):
    # GIVEN a loader that hands over small batches, and 0 workers measured at a tenth of its rate
    slow = trial(LoaderConfig(), 400.0)
    advice = diagnose(evidence(**{**TOY, "config": config}, trials=(slow,))).advice
    # THEN nothing advises to go back there
    assert not any("no worker" in each.sentence for each in advice)


def test_the_evidence_of_a_burst_is_its_means_and_what_its_batches_show():
    # GIVEN a burst of 48 batches of 0.1 s and two of 1 s, which the loop fetched itself
    def batch(service):
        ends = dict.fromkeys(("collate_end", "cpu_s", "received", "step_end"), service)
        return BatchTrace(
            worker=MAIN_PROCESS, fetch_start=0.0, fetch_end=0.9 * service, requested=0.0, samples=32, **ends
        )

    burst = trial(traces=tuple(map(batch, [0.1] * 48 + [1.0] * 2))).measurement
    found = Evidence.of(burst, config=FOUR, cores=4, wait_share=0.3)
    assert (found.samples_per_s, found.fetch_s, found.wait_share) == (1000.0, 0.11, 0.3)
    assert (found.slow_times, found.receive_s) == (pytest.approx(10.0), 0.0)
    assert found.collate_share == pytest.approx(0.1)
