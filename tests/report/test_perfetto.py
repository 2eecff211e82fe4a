"""The trace file, read as Perfetto reads it."""

import itertools
import json

import pytest
from report.example import synthetic_result

from autotune_loader.report.perfetto import processes_of, write_trace
from autotune_loader.values import BatchTrace, LoaderTrace, spans_of

RESULT = synthetic_result()


def rows_of(workers, pins=False):
    """The batches of the first trial with so many workers; where a thread pins, it takes 1 ms."""
    trial = next(each for each in RESULT.trials if each.config.num_workers == workers)
    traces, free = list[BatchTrace](), 0.0
    for each in sorted(trial.measurement.traces, key=lambda trace: trace.collate_end):
        begun = max(free, each.collate_end)
        free = min(begun + 0.001, max(begun, each.received))
        traces.append(each._replace(pin_start=begun, pin_end=free) if pins else each)
    return dict(enumerate(sorted(traces, key=lambda trace: trace.requested), 1))


@pytest.fixture
def written(tmp_path):
    """Writes loaders, and gives the events."""

    def write(*loaders):
        write_trace(path := tmp_path / "trace.json", loaders)
        return json.loads(path.read_bytes())["traceEvents"]

    return write


def named(events, kind, pid=1000):
    """By its id, the name of the process or of each thread."""
    return {
        each["tid"]: each["args"]["name"]
        for each in events
        if each["name"] == f"{kind}_name" and each["pid"] == pid
    }


def complete(events):
    return [each for each in events if each["ph"] == "X"]


LOADERS = [(0, False), (4, False), (4, True)]


@pytest.mark.parametrize(("workers", "pins"), LOADERS)
def test_the_spans_of_a_batch_are_written(workers, pins, written):
    rows = rows_of(workers, pins)
    events = written(LoaderTrace("train.py:12", rows))
    assert named(events, "process") == {1000: "train.py:12"}
    threads, zero = named(events, "thread"), min(each.fetch_start for each in rows.values())
    rows_names = ["training loop", *["pinning thread"] * pins]
    rows_names += [f"worker {number}" for number in range(workers)]
    assert list(threads.values()) == rows_names
    names, expected = processes_of(rows.values()), []
    for number, row in rows.items():
        for activity, process, *times in spans_of(row):
            place = "train.py:12" if activity == "send" else names[process]
            begin, end = (round(1e6 * (each - zero)) for each in times)
            expected.append((number, activity, place, begin, end))
    ends = {each["id2"]["local"]: each["ts"] for each in events if each["ph"] == "e"}
    found = []
    for each in events:
        if each["ph"] in {"X", "b"}:
            end = each["ts"] + each["dur"] if "dur" in each else ends[each["id2"]["local"]]
            place = "train.py:12" if each["name"] == "send" else threads[each["tid"]]
            found.append((each["args"]["batch"], each["name"], place, each["ts"], end))
    assert sorted(found) == sorted(expected)
    assert min(each["ts"] for each in events if "ts" in each) == 0


@pytest.mark.parametrize(("workers", "pins"), LOADERS)
def test_no_span_of_a_thread_crosses_another(workers, pins, written):
    """Perfetto would leave it out."""
    spans = complete(written(LoaderTrace("x", rows_of(workers, pins))))
    spans.sort(key=lambda each: (each["tid"], each["ts"], -each["dur"]))
    for _, own in itertools.groupby(spans, lambda each: each["tid"]):
        is_open = []
        for each in own:
            while is_open and is_open[-1] <= each["ts"]:
                is_open.pop()
            is_open.append(each["ts"] + each["dur"])
            assert is_open == sorted(is_open, reverse=True)


def test_a_fetch_has_its_numbers(written):
    rows = rows_of(4)
    events = written(LoaderTrace("x", rows))
    told = [each["args"] for each in events if each["name"] == "fetch"]
    for number, row in rows.items():
        cpu_ms, wait_ms = round(1e3 * row.cpu_s, 3), round(1e3 * row.wait_s, 3)
        numbers = {"samples": row.samples, "cpu_ms": cpu_ms, "wait_ms": wait_ms}
        assert told[number - 1] == {"batch": number, **numbers}


def test_arrows_lead_from_fetch_to_step(written):
    loaders = [LoaderTrace("a", rows_of(4, pins=True)), LoaderTrace("b", rows_of(4))]
    events = written(*loaders, LoaderTrace("c", rows_of(0)))
    ways = {}
    for each in sorted(complete(events), key=lambda each: each["ts"]):
        place = each["pid"], each["args"]["batch"], each["name"]
        if "bind_id" in each:
            way = *place, "flow_in" in each, "flow_out" in each
            ways.setdefault(each["bind_id"], []).append(way)
    begin, pin, end = ("fetch", False, True), ("pin", True, True), ("step", True, False)
    expected = [[(1000, number, *at) for at in (begin, pin, end)] for number in loaders[0].rows]
    expected += [[(2000, number, *at) for at in (begin, end)] for number in loaders[1].rows]
    assert sorted(ways.values()) == sorted(expected)


def test_loaders_keep_their_order_and_times(written):
    early, late = rows_of(4), rows_of(1)
    events = written(LoaderTrace("late", late), LoaderTrace("early", early))
    titles = {**named(events, "process", 1000), **named(events, "process", 2000)}
    assert titles == {1000: "late", 2000: "early"}
    order = [each["args"]["sort_index"] for each in events if each["name"] == "process_sort_index"]
    assert order == sorted(order)
    first = [
        min(each["ts"] for each in complete(events) if each["pid"] == pid) for pid in (1000, 2000)
    ]
    begun = [min(each.fetch_start for each in rows.values()) for rows in (late, early)]
    assert first[0] - first[1] == pytest.approx(1e6 * (begun[0] - begun[1]), abs=1)
    threads = [(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"]
    assert len(threads) == len({tid for _, tid in threads}) == 2 + 1 + 4


def test_batches_that_were_not_kept_are_marked(written):
    rows = rows_of(4)
    kept = {number: row for number, row in rows.items() if number not in {*range(10, 15), 20}}
    events = written(LoaderTrace("x", kept))
    hole, small = (each for each in events if each["name"] == "not kept")
    assert [each["args"] for each in (hole, small)] == [{"batches": 5}, {"batches": 1}]
    assert hole["dur"] == pytest.approx(1e6 * (rows[15].requested - rows[9].step_end), abs=1)


def ready_in(events):
    return [(each["ts"], each["args"][""]) for each in events if each["name"] == "ready batches"]


@pytest.mark.parametrize("pins", [False, True])
def test_ready_batches_are_counted_as_they_change(pins, written):
    rows = rows_of(4, pins)
    counts = ready_in(written(LoaderTrace("x", rows)))
    zero = min(row.fetch_start for row in rows.values())
    assert counts[-1][0] == pytest.approx(1e6 * (rows[len(rows)].ready - zero), abs=1)
    assert len(counts) > len(rows)
    for (moment, count), (until, _) in itertools.pairwise(counts):
        between = zero + (moment + until) / 2e6
        if until > moment + 2:
            assert count == sum(row.ready <= between < row.received for row in rows.values())


def test_beside_holes_few_say_nothing_of_ready(written):
    rows = rows_of(4)
    kept = {number: row for number, row in rows.items() if number % 8}
    assert ready_in(written(LoaderTrace("x", kept))) == []
    assert ready_in(written(LoaderTrace("x", rows_of(0)))) == []


def test_intervals_and_counters_have_tracks_of_their_own(written):
    intervals = [("epoch 1", 0.5, 9.0), ("evaluation", 6.0, 8.5)]
    counters = {"GPU utilization": [(1.0, 0.25), (2.0, float("nan")), (4.0, 1)]}
    events = written(LoaderTrace("train.py:12", {}, intervals, counters))
    assert named(events, "thread") == {1001: "training loop", 1000: "phases"}
    spans = [(each["name"], each["tid"], each["ts"], each["dur"]) for each in complete(events)]
    epoch, evaluation = (0, 8_500_000), (5_500_000, 2_500_000)
    assert spans == [("epoch 1", 1000, *epoch), ("evaluation", 1000, *evaluation)]
    counted = [(each["name"], each["ts"], each["args"]) for each in events if each["ph"] == "C"]
    told = [(500_000, {"": 0.25}), (3_500_000, {"": 1})]
    assert counted == [("GPU utilization", *each) for each in told]
    # AND time 0 may be a counter's
    early = written(LoaderTrace("train.py:12", {}, intervals, {"memory": [(0.25, 1)]}))
    assert [each["ts"] for each in complete(early)] == [250_000, 5_750_000]


def test_clocks_that_disagree_make_no_negative_span(written):
    """Another process's stamps may lie a little beside the loop's."""
    row = BatchTrace(0, 1.0, 2.0, 3.0, 0.5, 8, 1.5, 2.999, 4.0)
    events = written(LoaderTrace("x", {1: row}))
    assert min(each["dur"] for each in complete(events)) >= 0
    begin, end = (next(each["ts"] for each in events if each["ph"] == phase) for phase in "be")
    assert begin == end


@pytest.mark.parametrize(("loaders", "events"), [((), 0), ((LoaderTrace("x", {}),), 4)])
def test_a_trace_without_batches_is_one(loaders, events, written):
    assert len(written(*loaders)) == events


def test_a_trace_is_replaced_at_once(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, [LoaderTrace("x", rows_of(0))])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_trace(path, [LoaderTrace("x", rows_of(4), counters={"memory": [(0.0, "much")]})])
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    assert json.loads(before)["displayTimeUnit"] == "ms"
