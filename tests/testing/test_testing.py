"""What tests rest on has to be right first: the guard of unit tests, and the simulated machine."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from autotune_loader.values import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, with_workers

PLAN = BurstPlan(max_s=1.0, relative_error=0.0)
STEADY = dict.fromkeys(("service_cv", "step_cv", "alpha", "receive_s", "first_batch_extra_s"), 0.0)

ACTS = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    "fork": lambda: os.fork() or os._exit(0),
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "sleep": lambda: time.sleep(0.2),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_unit_test_that_starts_or_sleeps_fails(act, unit_guard):
    with pytest.raises(pytest.fail.Exception, match=r"a unit test (starts a process|sleeps)"):
        act()
    # THEN it fails also where somebody has caught the error
    with pytest.raises(pytest.fail.Exception, match="mark it process, system or acceptance"):
        unit_guard.check()
    unit_guard.offence = None


def probe_on(seed=0, **machine):
    return SimulatedProbe(SimulatedMachine(**machine), FakeClock(100.0), seed=seed)


FAST = {"cpu_s": 0.001, "step_s": 0.02, "receive_s": 0.01}
WAITING = {"cpu_s": 0.0, "wait_s": 0.04, "step_s": 0.0001}
RATES = {
    "two workers": (2, {"cpu_s": 0.04, "step_s": 0.015}, 2 / 0.04),
    "the step is slower": (3, {"cpu_s": 0.04, "step_s": 0.015}, 1 / 0.015),
    "one after the other": (0, {"cpu_s": 0.03, "wait_s": 0.01, "step_s": 0.01}, 1 / 0.05),
    "more workers than cores": (4, {"cores": 2, "cpu_s": 0.04, "step_s": 0.0001}, 2 / 0.04),
    "waiting takes no core": (8, {"cores": 2, **WAITING}, 8 / 0.04),
    "receipt": (1, FAST, 1 / 0.03),
    "receipt of many workers": (4, {"receive_growth": 0.25, **FAST}, 1 / 0.04),
    "two threads a core": (
        8, {"cores": 8, "full_cores": 4, "further_core": 0.3, "step_s": 0.0001}, 5.2 / 0.04,
    ),
    "storage serves two at once": (8, {"servers": 2, **WAITING}, 2 / 0.04),
}  # fmt: skip


@pytest.mark.parametrize(("workers", "machine", "batches_per_s"), RATES.values(), ids=RATES)
def test_the_long_run_rate_is_of_what_binds(workers, machine, batches_per_s):
    truth = probe_on(**{**STEADY, **machine}).truth(with_workers(workers))
    assert truth == pytest.approx(32 * batches_per_s, rel=0.01)


def test_workers_slow_a_step_on_their_cores():
    probe = probe_on(**STEADY, cores=2, cpu_s=0.04, step_s=0.02, step_cores=2.0)
    assert probe.burst(with_workers(2), PLAN).step_s > 0.022
    assert probe.step_ceiling(PLAN).samples_per_s.value == pytest.approx(1600)


@pytest.mark.parametrize(("workers", "depth"), [(1, 8), (2, 2)])
def test_full_queues_hide_no_waiting(workers, depth):
    config = with_workers(workers, depth)
    times = {"cores": 2, "cpu_s": 0.001, "wait_s": 0.05, "step_s": 0.02}
    probe = probe_on(**{**STEADY, **times, "receive_s": 1e-4, "service_cv": 0.1})
    in_the_long_run = 1 - probe.truth(config) * 0.02 / 32
    plans = [BurstPlan(max_s=0.5, min_s=0.3, prefill_s=s) for _ in range(4) for s in (0.0, 0.75)]
    seen = [probe.burst(config, plan).wait_share for plan in plans]
    # Summed up over the window it read half as much from full queues.
    assert in_the_long_run > 0.15
    assert seen == pytest.approx([in_the_long_run] * 8, abs=0.12)
    assert sum(seen) / len(seen) == pytest.approx(in_the_long_run, abs=0.05)
