from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_loader.machine.meters.sampler import Sampler, time_weighted_mean
from tests.support import FakeClock


def sampled_at(look_s: list[float], *, period_s: float) -> list[float]:
    """When a sampler begins its looks, if they take so long and waiting is exact."""
    clock, begun, durations = FakeClock(100.0), [], iter(look_s)

    def look() -> None:
        begun.append(clock() - 100.0)
        clock.advance(next(durations))

    def wait(seconds: float) -> bool:
        clock.advance(max(0.0, seconds))
        return len(begun) == len(look_s)

    Sampler(look, period_s=period_s, clock=clock, wait=wait).run()
    return begun


def test_slow_looks_do_not_shift_later_deadlines() -> None:
    assert sampled_at([0.4, 0.9, 0.1, 0.5], period_s=1.0) == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_missed_looks_are_skipped_not_made_up_for() -> None:
    assert sampled_at([0.0, 2.5, 0.0, 0.0], period_s=1.0) == pytest.approx([0.0, 1.0, 4.0, 5.0])


def test_stopping_does_not_wait_for_the_next_deadline() -> None:
    # GIVEN a sampler that looks once a minute
    looked = threading.Event()
    sampler = Sampler(looked.set, period_s=60.0)
    sampler.start()
    assert looked.wait(10.0)
    # WHEN it is stopped
    began = time.monotonic()
    sampler.stop()
    # THEN it is over long before the next look, with the one it made
    assert time.monotonic() - began < 10.0
    assert len(sampler.series) == 1


def test_no_thread_is_left_after_stopping_even_twice_or_unstarted() -> None:
    before = threading.active_count()
    sampler = Sampler(lambda: None, period_s=0.01)
    sampler.start()
    sampler.stop()
    sampler.stop()
    Sampler(lambda: None, period_s=0.01).stop()
    assert threading.active_count() == before


def test_a_look_may_stop_its_own_sampler() -> None:
    # GIVEN a look that ends the sampling it is part of
    sampler: Sampler[None] = Sampler(lambda: sampler.stop(), period_s=0.01)
    # WHEN it runs THEN it ends after that look
    sampler.run()
    assert len(sampler.series) == 1


def test_a_look_that_raises_ends_the_sampling_and_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    # GIVEN a look that raises
    error = RuntimeError("broken")

    def look() -> None:
        raise error

    # WHEN it runs
    sampler = Sampler(look, period_s=0.01)
    sampler.run()
    # THEN the exception is kept and logged
    assert (sampler.error, sampler.series) == (error, ())
    assert "broken" in caplog.text


def test_a_period_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"period_s=0.25 would work"):
        Sampler(lambda: None, period_s=0)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_may_fork_while_sampling() -> None:
    # GIVEN a sampler that is always looking
    sampler = Sampler(lambda: sum(range(1000)), period_s=0.0001)
    sampler.start()
    for _ in range(20):
        # WHEN the process forks and the child stops its copy
        pid = os.fork()
        if pid == 0:
            sampler.stop()
            os._exit(7)
        # THEN the child ends
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    sampler.stop()


def test_a_value_weighs_as_long_as_the_time_it_looks_back_on() -> None:
    # GIVEN 100 % for one second and 0 % for three
    assert time_weighted_mean([(11.0, 1.0), (14.0, 0.0)], start=10.0) == pytest.approx(0.25)


def test_no_time_has_no_mean() -> None:
    assert time_weighted_mean([], start=0.0) is None


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), min_size=1))
def test_the_mean_lies_between_the_values(steps: list[tuple[float, float]]) -> None:
    now, series = 0.0, []
    for span, value in steps:
        now += span
        series.append((now, value))
    mean = time_weighted_mean(series, start=0.0)
    values = [value for _, value in series]
    assert mean is not None
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9
