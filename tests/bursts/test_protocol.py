"""What parent and child send to each other, over a pair of sockets in one process."""

import math
from multiprocessing import Pipe

import pytest

from autotune_loader.bursts.protocol import Message, Request, WarmupReport, receive, send
from autotune_loader.values import (
    BatchTrace,
    BurstPlan,
    Failure,
    Interval,
    LoaderConfig,
    Measurement,
    MemoryUse,
)
from autotune_loader.values.trace import Seen, StageSamples

MEASURED = Measurement(
    samples_per_s=Interval(value=3.0, low=-math.inf, high=math.inf, count=1),
    batch_size=2.0,
    first_batch_s=None,
    **dict.fromkeys(("wait_share", "service_s", "service_cpu_s", "receive_s", "step_s"), 0.1),
    memory=MemoryUse(rss_bytes=1 << 40),
    traces=(BatchTrace(0, 1.0, 2.0, 3.0, 0.5, 2, 0.1, 3.1, 4.0), BatchTrace(*range(11))),
    stages=StageSamples(
        seen=(Seen("decode", "a.py:4", 0.2, 0.1),), samples=2.0, cpu_s=0.3, queue_cpu_s=0.0
    ),
)
KNOWN = WarmupReport(
    samples=8,
    batch_bytes=64,
    batch_tensors=1,
    on_accelerator=False,
    first_fetch_s=math.inf,
    first_fetch_cpu_s=0.1,
    notes=("caf\u00e9", "bad-\udcff.jpg"),
)


@pytest.mark.parametrize(
    "record",
    [
        Request(what="burst", plan=BurstPlan(place=3), config=LoaderConfig(num_workers=2)),
        Message(phase="first_batch"),
        Message(ready=KNOWN),
        Message(measurement=MEASURED),
        Message(failure=Failure(kind="deadline", phase="step", message="late"), ends_run=True),
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_is_sent_is_received(record):
    ours, theirs = Pipe()
    with ours, theirs:
        send(ours, record)
        received = receive(theirs, type(record))
    assert received == record
    if received.__class__ is Message and received.measurement:  # these two are not compared
        assert received.measurement.traces == record.measurement.traces
        assert received.measurement.stages == record.measurement.stages


@pytest.mark.parametrize("sent", [b"\x80\x04.", b'{"phase": "tea"}', b'{"failure": 3}'])
def test_what_is_no_record_is_refused(sent):
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send_bytes(sent)
        with pytest.raises(ValueError, match=r"decode|must be of type"):
            receive(theirs, Message)
