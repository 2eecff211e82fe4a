"""What was done with a batch, and where."""

import pytest

from autotune_loader.values import MAIN_PROCESS, BatchTrace, spans_of
from autotune_loader.values.trace import PINNING_THREAD, Span

STEPPED = [Span("wait", MAIN_PROCESS, 4.0, 6.0), Span("step", MAIN_PROCESS, 6.0, 9.0)]


@pytest.mark.parametrize(
    ("worker", "pinned", "sent"),
    [
        (2, (), [Span("send", 2, 3.0, 6.0)]),
        (2, (3.5, 5.0), [Span("send", 2, 3.0, 3.5), Span("pin", PINNING_THREAD, 3.5, 5.0)]),
        (MAIN_PROCESS, (), []),
    ],
)
def test_a_batch_is_sent_until_somebody_has_it(worker, pinned, sent):
    trace = BatchTrace(worker, 1.0, 2.0, 3.0, 0.5, 8, 4.0, 6.0, 9.0, *pinned)
    made = [Span("fetch", worker, 1.0, 2.0), Span("collate", worker, 2.0, 3.0)]
    assert sorted(spans_of(trace)) == sorted([*STEPPED, *made, *sent])
