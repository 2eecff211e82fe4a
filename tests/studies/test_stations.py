"""Studies of a GPU name what binds and which law says so, and tell of one side over the other only what rounds show."""

import json

import pytest

from autotune_loader.values import BurstPlan, Interval, LoaderConfig
from studies.gpu.stations import BESIDE, MADE, PINNED, TAKEN, WITHIN, Stations
from studies.gpu.training import Rate, in_turns, verdict_of
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe


@pytest.mark.parametrize(
    ("binds", "holds", "cpu_s", "pin_s", "step_s"),
    [
        # With two workers pinning is waited for, 23 ms a batch, and costs nothing: with eight no loop takes 38 ms.
        (PINNED, [BESIDE], 0.16, 0.03, 0.015),
        (TAKEN, [BESIDE, WITHIN], 0.16, 0.001, 0.03),
        (MADE, [BESIDE, WITHIN], 0.32, 0.005, 0.015),
    ],
)
def test_what_binds_and_the_laws_that_give_the_rate_are_named(
    capsys, binds, holds, cpu_s, pin_s, step_s
):
    # GIVEN a machine of which two and eight workers are seen
    steady = {"service_cv": 0.0, "step_cv": 0.0, "alpha": 0.0, "first_batch_extra_s": 0.0}
    machine = SimulatedMachine(cores=10, cpu_s=cpu_s, pin_s=pin_s, step_s=step_s, **steady)
    plan, seen = BurstPlan(max_s=3.0, min_s=3.0, relative_error=0.0), []
    for workers in (2, 8):
        config = LoaderConfig(num_workers=workers, prefetch_factor=2, pin_memory=True)
        traces = SimulatedProbe(machine, FakeClock()).burst(config, plan).traces
        seen.append(Stations.of(config, traces))
    # WHEN the eight are recorded
    seen[1].record("simulated", seen[0])
    found, by_own, by_two = (
        json.loads(line.removeprefix("RECORD ")) for line in capsys.readouterr().out.splitlines()
    )
    # THEN the rate is what binds, and by those of two workers only the right laws give it
    assert found["batch_s"] == pytest.approx(max(cpu_s / 8, pin_s, step_s), rel=0.03)
    assert (found["binds"], by_own["holds"], by_two["holds"]) == (binds, [BESIDE, WITHIN], holds)


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.985, 1.015, "within 2%"),
        (1.005, 1.015, "within 2%"),
        (1.005, 1.03, "faster"),
        (0.90, 0.99, "slower"),
        (0.97, 1.01, "not told"),
    ],
)
def test_an_interval_tells_who_is_faster_or_that_it_does_not(low, high, says):
    assert verdict_of(Interval(value=(low + high) / 2, low=low, high=high, count=8)) == says


@pytest.mark.parametrize(("left_s", "rounds"), [([9.0, 9.0, 9.0], 4), ([9.0, 0.0], 2), ([-1.0], 1)])
def test_no_round_begins_that_would_not_end_in_time(left_s, rounds):
    class Left:
        left = iter(left_s).__next__

    side = Rate(samples_per_s=1.0, gpu_util=None)
    assert len(in_turns("job", {"one": lambda: side}, 4, Left())["one"]) == rounds
