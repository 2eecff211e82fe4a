"""A promise turns red where rounds surely break it: not by noise, not by a busy machine."""

from types import SimpleNamespace

import pytest

from autotune_loader.values import Interval
from studies import __main__ as command
from studies.live import never_slower as slower
from studies.live import transfer
from studies.study import Row, print_table
from studies.verdict import Verdict, confirmed, fast_enough, never_slower, ratio


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Its commit is asked of git, in a process."""
    monkeypatch.setattr(command, "machine", lambda: "a machine")


def between(low, high):
    return Interval(value=(low + high) / 2, low=low, high=high, count=5)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (3.2, 4.0, Verdict.KEPT),
        (2.5, 3.5, Verdict.UNKNOWN),
        (0.0, float("inf"), Verdict.UNKNOWN),
        (2.0, 2.9, Verdict.BROKEN),
    ],
)
def test_rates_below_three_times_break_the_promise(low, high, verdict):
    assert fast_enough(between(low, high)) is verdict


@pytest.mark.parametrize(
    ("low", "high", "plain_s", "verdict"),
    [
        (0.5, 0.9, 2.0, Verdict.KEPT),
        (1.1, 1.2, 2.0, Verdict.KEPT),  # within half a second
        (1.1, 1.4, 2.0, Verdict.UNKNOWN),
        (1.1, 1.2, 20.0, Verdict.BROKEN),
        (1.3, 1.5, 2.0, Verdict.BROKEN),
    ],
)
def test_slower_beyond_both_bounds_breaks_the_promise(low, high, plain_s, verdict):
    assert never_slower(between(low, high), plain_s) is verdict


def test_ratios_are_paired_and_two_rounds_little():
    # GIVEN a machine that becomes ten times as slow, for both sides
    found = ratio([40.0, 4.0, 0.41, 0.04], [10.0, 1.0, 0.10, 0.01])
    assert found.low == pytest.approx(3.9, abs=0.1)
    assert found.high == pytest.approx(4.1, abs=0.1)
    assert fast_enough(ratio([1.0, 1.1], [1.0, 1.0])) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("looks", "free", "verdict"),
    [
        ([2.0, 2.0], 1.0, Verdict.BROKEN),
        ([2.0, 4.0], 1.0, Verdict.KEPT),
        ([4.0], 1.0, Verdict.KEPT),
        ([2.0], 0.5, Verdict.UNKNOWN),  # neighbours want the cores
        ([4.0], 0.5, Verdict.KEPT),
    ],
)
def test_two_looks_with_free_cores_break_promises(looks, free, verdict):
    values = iter(looks)

    def measure():
        found = between(*[next(values)] * 2)
        return found, fast_enough(found)

    assert confirmed(measure, lambda: free).verdict is verdict
    assert next(values, None) is None


@pytest.mark.parametrize(
    ("verdict", "is_met"),
    [(Verdict.KEPT, True), (Verdict.UNKNOWN, True), (Verdict.BROKEN, False)],
)
def test_a_table_fails_by_a_broken_promise_alone(verdict, is_met, capsys):
    row = Row({"job": "tiny", "verdict": verdict.value}, verdict.is_met)
    assert print_table([Row({"job": "large", "verdict": "kept"}, True), row]) is is_met
    assert f"| tiny | {verdict.value} |" in capsys.readouterr().out


# Where workers could not fetch three times as many, transfer is not what counts.
@pytest.mark.parametrize(
    ("times", "none", "status"), [(2.0, 1000.0, 1), (4.0, 1000.0, 0), (2.0, 110.0, 0)]
)
def test_the_command_fails_by_a_slow_transfer(times, none, status, monkeypatch, capsys):
    plain = [100.0, 101.0, 99.0, 100.0]
    rates = {"none": [none], "plain": plain, "ours": [times * each for each in plain]}
    monkeypatch.setattr(transfer, "inspect_machine", lambda: SimpleNamespace(usable_cores=2))
    monkeypatch.setattr(transfer, "rates_of", lambda *given: rates)
    monkeypatch.setattr(transfer, "cores_free", lambda: 1.0)
    assert command.main(["live.transfer", "--quick", "--only", "tiny"]) == status
    assert ("broken |" in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize(
    ("auto_s", "free", "status"), [(3.0, 1.0, 1), (3.0, 0.5, 0), (2.4, 1.0, 0)]
)
def test_the_command_fails_by_a_slower_loop(auto_s, free, status, monkeypatch, capsys):
    seconds = {"plain": 2.0, "auto": auto_s}
    monkeypatch.setattr(slower, "forked", lambda job, name, workers, how: seconds[how])
    monkeypatch.setattr(slower, "cores_free", lambda: free)
    assert command.main(["live.never_slower", "--quick", "--only", "text"]) == status
    assert ("broken |" in capsys.readouterr().out) is bool(status)
