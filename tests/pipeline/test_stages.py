"""From counts to shares: what adds up, and what is left unsaid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.pipeline.stages import HAND_OVER, OTHER_THREADS, REST, StageTally, pooled, stage_times
from autotune_loader.values.stages import Seen, StageSamples, StageTime

SEEN = (
    Seen(stage="read", where="a.py:1, open", waiting=200.0),
    Seen(stage="decode", where="a.py:2, PIL.Image.convert", computing=300.0),
    Seen(stage="decode", where="a.py:3, PIL.Image.convert", computing=50.0),
    Seen(stage="crop", where="a.py:9", computing=50.0, waiting=50.0),
)
# 8 s of which 4 s were computed, by one thread on a quiet machine
BURST = StageSamples(
    seen=SEEN, samples=1000.0, wall_s=8.0, cpu_s=4.0, thread_cpu_s=4.0, crowded_s=0.0, queue_cpu_s=0.0, looks=400.0
)


def by_name(burst: StageSamples) -> dict[str, StageTime]:
    return {each.stage: each for each in stage_times(burst)}


def test_computing_and_waiting_are_shared_out() -> None:
    found = by_name(BURST)
    assert found["decode"].wall_s == pytest.approx(350 / 400 * 4 / 1000)
    assert found["decode"].cpu_share == pytest.approx(350 / 400)
    assert found["decode"].where == "a.py:2, PIL.Image.convert"
    assert found["read"].wall_share == pytest.approx(0.8 * 4 / 8)
    assert found["read"].cpu_share == 0
    assert found["crop"].wall_s == pytest.approx((0.125 * 4 + 0.2 * 4) / 1000)


@pytest.mark.parametrize("queue_cpu_s", [0.0, 1.0])
def test_shares_add_up_to_one_and_the_longest_comes_first(queue_cpu_s: float) -> None:
    found = stage_times(replace(BURST, queue_cpu_s=queue_cpu_s, cpu_s=4.0 + queue_cpu_s))
    assert sum(each.wall_share for each in found) == pytest.approx(1)
    assert sum(each.cpu_share for each in found) == pytest.approx(1)
    assert [each.wall_share for each in found] == sorted((each.wall_share for each in found), reverse=True)
    assert {each.stage: each for each in found}[HAND_OVER].cpu_s == pytest.approx(queue_cpu_s / 1000)


def test_waiting_for_a_core_is_no_stages_own() -> None:
    # GIVEN 2 of the 4 s that were not computed were spent waiting for a core
    found = by_name(replace(BURST, crowded_s=2.0))
    # THEN they belong to the burst, and to no stage
    assert found["read"].wall_s == pytest.approx(0.8 * 2 / 1000)
    assert found["decode"].wall_s == pytest.approx(350 / 400 * 4 / 1000)


def test_what_other_threads_compute_is_told_apart() -> None:
    found = by_name(replace(BURST, cpu_s=8.0))
    assert found[OTHER_THREADS].cpu_share == pytest.approx(0.5)
    assert found[OTHER_THREADS].wall_share == 0


def test_an_operator_whose_samples_come_late_keeps_what_was_seen_of_it_for_certain() -> None:
    # GIVEN 100 of 350 looks found `scale` computing; its CPU samples were all taken in the next function
    seen = (*SEEN[1:], Seen(stage="scale", where="a.py:5", released=100.0), Seen(stage="read", where="", waiting=200.0))
    assert by_name(replace(BURST, seen=seen))["scale"].cpu_share > 0.15


def test_too_few_samples_say_nothing() -> None:
    few = tuple(replace(each, computing=each.computing / 100, waiting=each.waiting / 100) for each in SEEN)
    assert stage_times(replace(BURST, seen=few)) == ()
    assert stage_times(None) == ()
    assert stage_times(replace(BURST, samples=0.0)) == ()


def test_lines_without_a_name_and_small_stages_take_nothing_away() -> None:
    seen = (*SEEN, Seen(stage="", where="", computing=500.0), Seen(stage="tiny", where="a.py:7", computing=1.0))
    found = by_name(replace(BURST, seen=seen))
    assert found["decode"].cpu_share == pytest.approx(350 / 401)
    assert "tiny" not in found
    assert found[REST].cpu_share == pytest.approx(1 / 401)


def test_bursts_are_pooled_by_what_was_seen() -> None:
    both = pooled([BURST, None, BURST])
    assert both is not None
    assert (both.samples, both.wall_s) == (2000.0, 16.0)
    assert stage_times(both) == stage_times(BURST)
    assert pooled([None]) is None


def test_reports_of_workers_add_up() -> None:
    tally = StageTally()
    assert tally.samples() is None
    for _ in range(2):
        tally.add(((("read", "a.py:1", 0.0, 3.0, 1.0),), (4.0, 0.5, 0.25, 0.25, 0.0, 0.125, 4.0)))
    found = tally.samples()
    assert found is not None
    assert found.seen == (Seen(stage="read", where="a.py:1", waiting=6.0, released=2.0),)
    assert (found.samples, found.wall_s, found.queue_cpu_s) == (8.0, 1.0, 0.25)
