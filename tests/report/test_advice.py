"""Each verdict from a measurement that shows it, with the advice that follows: one table of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.space import Limits, Space
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from autotune_loader.values.trial import Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

BEST = LoaderConfig(num_workers=4)


def exactly(value):
    return Interval(value=value, low=value, high=value, count=20)


def measured(**changes):
    """A CPU-bound loader: 100 ms of CPU per batch in a worker, and a loop that waits half of its time."""
    values = {
        "samples_per_s": exactly(1000.0), "samples": 1000, "window_s": 1.0, "batch_size": 32.0, "first_batch_s": 0.2,
        "wait_share": 0.5, "service_s": 0.11, "service_cpu_s": 0.10, "receive_s": 0.001, "step_s": 0.015,
        "batch_bytes": 4 << 20, **changes,
    }  # fmt: skip
    return Measurement(**values)


def evidence(measurement=None, **changes):
    measurement = measurement or measured()
    values = {
        "best": BEST, "measurement": measurement, "rate": measurement.samples_per_s, "ceiling": exactly(2000.0),
        "usable_cores": 4, "on_accelerator": False, "epoch_batches": 10_000, "trials": (), "has_batched_fetch": False,
        **changes,
    }  # fmt: skip
    return Evidence(**values)


def failed(workers, kind="oom_killed", **changes):
    failure = Failure(kind=kind, phase="batches", message="no room")
    return Trial(number=0, config=LoaderConfig(num_workers=workers), role="search", failure=failure, **changes)


def traces(services):
    times = {"worker": MAIN_PROCESS, "fetch_start": 0.0, "requested": 0.0, "samples": 32}
    ends = ("fetch_end", "collate_end", "cpu_s", "received", "step_end")
    return tuple(BatchTrace(**times, **dict.fromkeys(ends, service)) for service in services)


def simulated(best, others=(), *, limits=None, **machine):
    """Evidence from bursts on a simulated machine of four cores, with the twin that they make."""
    probe, plan = SimulatedProbe(SimulatedMachine(noise_sd=0.0, **machine), FakeClock()), BurstPlan(max_s=1.0)
    tried = [LoaderConfig(), LoaderConfig(num_workers=1), LoaderConfig(num_workers=4), *others]
    configs = [*(config for config in dict.fromkeys(tried) if config != best), best]
    trials = [
        Trial(number=number, config=config, role="search", measurement=probe.burst(config, plan))
        for number, config in enumerate(configs)
    ]
    step = probe.step_ceiling(None, plan)
    context = TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, step.step_s),))
    return evidence(
        trials[-1].measurement,
        best=best,
        ceiling=step.samples_per_s,
        on_accelerator=True,
        trials=trials,
        twin=fit_twin([(each.config, each.measurement) for each in trials], context),
        space=None if limits is None else Space(max_workers=16, limits=limits),
    )


def in_memory(**changes):
    """A worker-less loader of 64 samples in 1 ms, nine tenths of it for single samples."""
    fetched = [
        each._replace(fetch_end=0.0009, collate_end=0.001, received=0.001, step_end=0.0011)
        for each in traces([0.001] * 30)
    ]
    values = {"batch_size": 64.0, "service_s": 0.001, "service_cpu_s": 0.001, "step_s": 0.0001, "receive_s": 0.0}
    burst = measured(**values, samples_per_s=exactly(58_000.0), traces=tuple(fetched))
    return evidence(burst, best=LoaderConfig(), ceiling=exactly(640_000.0), **changes)


READ = StageTime(stage="read", where="a.py:1, open", wall_share=0.5, cpu_share=0.1, wall_s=3e-3, cpu_s=0.3e-3)
DECODE = StageTime(stage="decode", where="a.py:2, convert", wall_share=0.4, cpu_share=0.6, wall_s=1.8e-3, cpu_s=1.8e-3)
CROP = StageTime(stage="crop", where="a.py:3", wall_share=0.1, cpu_share=0.3, wall_s=0.9e-3, cpu_s=0.9e-3)
SLEEPS = {"wait_share": 0.08, "service_cpu_s": 0.01, "cpu_share": 0.3}
SIX, TWELVE = LoaderConfig(num_workers=6), LoaderConfig(num_workers=12)
WAITS = {"cpu_s": 0.001, "wait_s": 0.1, "step_s": 0.001, "worker_bytes": 500 << 20}
KEEPS_UP = {"cpu_s": 0.002, "step_s": 0.01, "receive_s": 0.0018, "service_cv": 0.02}
PINNED = LoaderConfig(num_workers=4, pin_memory=True)
# Batches of a few bytes that cost more to hand over than to step on.
TOY = measured(
    batch_bytes=800, receive_s=0.0004, service_s=0.0002, service_cpu_s=0.0002, wait_share=0.9, samples_per_s=exactly(6e4)
)  # fmt: skip
RARELY = measured(
    wait_share=0.12, service_s=0.004, service_cpu_s=0.003, batch_bytes=4000, cpu_share=0.27, foreign_cpu_share=0.7
)

# What binds, the evidence, words of the verdict, words of some advice (None: no advice at all).
CASES = {
    "the CPU": ("cpu", evidence(), "100 ms of CPU", "transforms cheaper"),
    "the CPU beside a step": ("cpu", evidence(measured(wait_share=0.01, step_s=0.03)),
        "30 ms of step, and there are 4 cores", ""),
    "threads of a library": ("cpu", evidence(measured(service_cpu_s=0.25)), "", "a worker keeps 2.3 cores busy"),
    "a slow stage": ("cpu", evidence(stage_times=(READ, DECODE, CROP)),
        "; decode takes 60 % of a worker's CPU (a.py:2, convert); ", "Make 'crop' cheaper (a.py:3)"),
    "more cores": ("cpu", simulated(BEST, cpu_s=0.1, step_s=0.004), "", "is predicted for 8 cores"),
    "a heavy tail": ("cpu", evidence(measured(traces=traces([0.1] * 48 + [1.0] * 2))), "", "allow=('in_order',)"),
    "what failed is no faster": ("cpu", evidence(trials=(failed(6, predicted_samples_per_s=1001.0),)), "", ""),
    "workers are kept": ("cpu",
        evidence(measured(first_batch_s=5.0), epoch_batches=100, best=replace(BEST, persistent_workers=True)),
        "", ""),
    "the step": ("step", evidence(measured(wait_share=0.02), ceiling=exactly(1020.0)),
        "reaches 1,000/s where the step alone", "Speed up the step"),
    "the step without a ceiling": ("step", evidence(measured(wait_share=0.01), ceiling=None),
        "waits for data 1 % of the time; the loader is not the place to gain.", ""),
    "fetches sleep, and are in time": ("step", evidence(measured(**SLEEPS), ceiling=exactly(1090.0)),
        "waits for data 8 % of the time, and it reaches 1,000/s", ""),
    "waiting": ("wait", evidence(measured(service_cpu_s=0.01)),
        "of 110 ms per batch a fetch computes 10 ms", "Read larger pieces"),
    "waiting in a stage": ("wait", evidence(measured(service_cpu_s=0.01), stage_times=(READ, DECODE)),
        "; read takes 100 % of a worker's waiting (a.py:1, open); ", "most of it in 'read' (a.py:1, open)"),
    "too few workers allowed": ("wait",
        replace(simulated(BEST, cpu_s=0.002, wait_s=0.1, step_s=0.004), space=Space(max_workers=4)),
        "", "max_workers=8"),
    "twelve are faster": ("wait", simulated(SIX, [TWELVE], wait_s=0.12, **KEEPS_UP), "", ""),
    "transport": ("transport", evidence(measured(receive_s=0.02)), "receiving one takes 20 ms for 4 MiB", "uint8"),
    "a toy": ("transport", evidence(TOY, ceiling=exactly(1.4e6)),
        "; the step takes next to nothing", "Hand over less often"),
    "workers that only write": ("transport",
        evidence(measured(service_s=0.009, service_cpu_s=0.008, batch_bytes=32 << 20)),
        "8 ms of CPU for 32 MiB", "uint8"),
    "pinning": ("pinning", simulated(PINNED, cpu_s=0.01, pin_s=0.03, step_s=0.002, batch_bytes=64 << 20),
        "64 MiB", "Send less per batch"),
    "memory that ran out": ("memory", evidence(trials=(failed(6, predicted_samples_per_s=1400.0),)),
        "6 workers, prefetch 2 ran out of it (oom killed)", "Make a worker smaller"),
    "shared memory that ran out": ("memory", evidence(trials=(failed(6, "shared_memory"),)), "", "--shm-size"),
    "memory that would run out": ("memory", simulated(BEST, limits=Limits(memory_bytes=4 << 30), **WAITS),
        "of memory, and there are 4 GiB", "Make a worker smaller"),
    "start-up": ("startup", evidence(measured(first_batch_s=5.0), epoch_batches=100),
        "of an epoch", "persistent_workers=True"),
    "in memory": ("in_memory", in_memory(), "no worker is needed", "__getitems__"),
    "in memory, in batches": ("in_memory", in_memory(has_batched_fetch=True), "no worker is needed", None),
    # Two witnesses that disagree: both are named, and nothing is concluded.
    "rarely fetches": ("unknown",
        evidence(RARELY),
        "yet a worker fetches for 3 % of its time only, and other processes kept 70 % of the cores busy", None),
    "slowed by something": ("unknown", evidence(measured(**SLEEPS), ceiling=exactly(1105.0)),
        "waits for data 8 % of the time, yet it reaches 1,000/s", None),
    "never waits, yet slow": ("unknown", evidence(measured(wait_share=0.01, cpu_share=0.2)),
        "yet it reaches 1,000/s where the step alone reaches 2,000/s", None),
    "neighbours": ("unknown", evidence(measured(wait_share=0.01, foreign_cpu_share=0.5)),
        "other processes kept 50 % of the cores busy", None),
    "waits at the ceiling": ("unknown", evidence(ceiling=exactly(1020.0)),
        "50 % of the time, yet it reaches 1,000/s", None),
    "no core was idle": ("unknown", evidence(measured(service_cpu_s=0.04, cpu_share=0.45, foreign_cpu_share=0.5)),
        "of 110 ms per batch a fetch computes 40 ms, yet no core was idle for it meanwhile (5 %)", None),
    "a doubted ceiling": ("unknown",
        evidence(measured(wait_share=0.01), ceiling=None, ceiling_doubt="the step alone was measured at 454/s"),
        "yet the step alone was measured at 454/s", None),
    "twelve are no faster": ("unknown", simulated(SIX, [TWELVE], wait_s=0.06, **KEEPS_UP),
        "yet with more workers, whose batches lay ready, the rate is no higher (2,7", None),
}  # fmt: skip


@pytest.mark.parametrize(("binding", "found", "words", "advised"), CASES.values(), ids=CASES)
def test_a_verdict_names_what_binds_and_advice_follows(binding, found, words, advised):
    verdict = judge(found)
    advice = advise(found, verdict)
    assert verdict.binding == binding
    assert words in verdict.sentence
    assert advice == () if advised is None else advised in "\n".join(map(str, advice))
    # Start-up is a matter of epochs, whose gain may lie beyond the ceiling of a burst.
    headroom = None if found.ceiling is None else found.ceiling.value / found.rate.value - 1
    assert verdict.headroom == (headroom if headroom is None else pytest.approx(max(0.0, headroom)))
    for each in advice:
        assert each.expected_gain is None or each.expected_gain > 0
        assert binding == "startup" or headroom is None or (each.expected_gain or 0.0) <= headroom + 1e-9


@pytest.mark.parametrize(
    ("found", "action", "gain"),
    [
        (evidence(measured(first_batch_s=3.31), epoch_batches=300), "persistent_workers", 1 / 3),  # 3.2 s of 9.6 s
        (in_memory(), "__getitems__", 1.1035 / (1.1035 - 0.75) - 1),  # collating shows that 0.75 ms of 1.1 ms can go
        (CASES["more cores"][1], "more cores", 0.8),
        (CASES["too few workers allowed"][1], "max_workers=8", 0.9),
        (CASES["memory that ran out"][1], "Make a worker smaller", 0.4),
        (replace(CASES["more cores"][1], stage_times=(CROP, READ, DECODE)), "'decode'", 1 / 0.7 - 1),  # half of 60 %
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gain_is_what_the_measured_cost_or_the_twin_says(found, action, gain):
    advice = next(each for each in advise(found, judge(found)) if action in each.action)
    assert advice.expected_gain == pytest.approx(gain, rel=0.3)


def test_stages_come_in_the_order_of_what_they_would_bring():
    found = replace(CASES["more cores"][1], stage_times=(CROP, READ, DECODE))
    first, second, *others = [each.action for each in advise(found, judge(found))]
    assert ("'decode'" in first, "'crop'" in second) == (True, True)
    assert not any("'read'" in each for each in others)
