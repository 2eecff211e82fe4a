"""What the cores allow, from measurements with known parts."""

import pytest
from report.bursts import BATCH, burst, step_on_a_cached_batch, traces

from autotune_loader.report.advice.limits import cpu_limit
from autotune_loader.values.trace import MAIN_PROCESS


def test_the_cpu_limit_counts_the_step_that_computes_beside_the_workers():
    # GIVEN decoding of 50 ms and a step that keeps one core busy for 57 ms
    bursts = [burst(traces(20, cpu_s=0.05))]
    steps = [step_on_a_cached_batch(0.057, cores_busy=1.0)]
    # WHEN four cores share both
    limit = cpu_limit(bursts, 4.0, steps)
    # THEN a batch takes 27 ms
    assert BATCH / limit == pytest.approx((0.05 + 0.057) / 4)


def test_the_cpu_limit_takes_the_thread_count_with_the_cheapest_step():
    # GIVEN a step that four threads finish sooner, but with more CPU seconds in all
    steps = [step_on_a_cached_batch(0.024, cores_busy=4.0), step_on_a_cached_batch(0.057, cores_busy=1.0)]
    # WHEN
    limit = cpu_limit([burst(traces(20))], 4.0, steps)
    # THEN
    assert BATCH / limit == pytest.approx((0.05 + 0.057) / 4)


def test_a_step_on_an_accelerator_leaves_the_cores_to_the_workers():
    # GIVEN no step on the CPU
    # WHEN
    limit = cpu_limit([burst(traces(20, cpu_s=0.04))], 4.0)
    # THEN
    assert limit == pytest.approx(4 * BATCH / 0.04)


def test_the_least_contended_burst_sets_the_cpu_limit():
    # GIVEN workers that take more CPU seconds when many run
    bursts = [burst(traces(20, cpu_s=0.06)), burst(traces(20, cpu_s=0.05))]
    # WHEN
    limit = cpu_limit(bursts, 4.0)
    # THEN
    assert limit == pytest.approx(4 * BATCH / 0.05)


def test_without_traces_there_is_no_cpu_limit():
    assert cpu_limit([burst()], 4.0) is None


def test_an_unknown_cpu_share_leaves_the_step_out():
    # GIVEN a machine that does not tell CPU use
    blind = burst(cpu_share=None)
    # THEN
    assert cpu_limit([burst(traces(20))], 4.0, [blind]) == pytest.approx(4 * BATCH / 0.05)


def test_the_main_process_is_no_worker_to_warm_up():
    # GIVEN a burst without workers
    # WHEN
    limit = cpu_limit([burst(traces(20, worker=MAIN_PROCESS))], 2.0)
    # THEN
    assert limit == pytest.approx(2 * BATCH / 0.05)
