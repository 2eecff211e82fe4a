"""What a row of `live.causes` is held against, and what its notes count. Jobs run in the study."""

import pytest

from studies.live import causes
from studies.live.causes import CAUSES, HEALTHY, Seen

STORAGE = next(each for each in CAUSES if each.kind == "storage")
CASES = {
    "its own cause": (["storage"], 2.0, False, True),
    "no cause": ([], 2.0, False, False),
    "a second one": (["storage", "pinning"], 2.0, False, False),
    "a wait for cores": (["storage", "cores"], 2.0, False, False),
    "a wait for cores, beside busy processes": (["storage", "cores"], 2.0, True, True),
    "what helps brings too little": (["storage"], 9.0, False, False),
}


@pytest.fixture
def reports(monkeypatch):
    """The causes that a report names, and the seconds of the loop with what helps."""
    found = {"kinds": [], "after_s": 1.0}

    def seen(job, simulated, verb="watch", cured=False):
        own = {"s": found["after_s"] if cured else 10.0, "MB": 1.0}
        return Seen(own, dict.fromkeys(found["kinds"]), 9.95, 10.2)

    monkeypatch.setattr(causes, "seen", seen)
    monkeypatch.setattr(causes, "busy_neighbours", lambda count: causes.contextlib.nullcontext())
    return found


@pytest.mark.parametrize(("kinds", "after_s", "busy", "is_met"), CASES.values(), ids=CASES)
def test_a_row_is_met_by_its_cause_alone(reports, kinds, after_s, busy, is_met):
    reports.update(kinds=kinds, after_s=after_s)
    row = next(causes.rows(only="storage", busy=busy))
    assert row.is_met is is_met


def test_a_healthy_job_has_no_cause(reports):
    assert next(causes.rows(only="decoded")).is_met is True
    reports.update(kinds=["storage"])
    assert next(causes.rows(only="decoded")).is_met is False


def test_notes_count_causes_wrong_names_and_seconds(reports):
    reports.update(kinds=["garbage_collection", "storage"])
    notes = [each for each in causes.rows(only="garbage,storage,decoded") if isinstance(each, str)]
    assert notes == [
        "named 2 of 2 causes; 3 wrong names",
        "named a cause in 1 of 1 healthy job",
        "wall and parts within 1% of the script's own seconds in 0 of 4 runs",
    ]


def test_two_jobs_of_a_cause_count_once():
    assert sorted({each.number for each in CAUSES}) == list(range(1, 13))
    assert len({each.job for each in CAUSES} | set(HEALTHY)) == 24


def test_seconds_are_off_by_the_further_of_both():
    assert Seen({"s": 10.0}, {}, 9.95, 10.2).off == pytest.approx(0.02)
    assert Seen({"s": 10.0}, {}, None, None).off is None
