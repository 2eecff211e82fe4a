"""`compare()` over a storage that is slow for whoever reads a sample first."""

import re

import pytest
from torch.utils.data import DataLoader

from autotune_loader import compare
from tests.support.bursts import ColdStore

pytestmark = [
    pytest.mark.system,  # what bursts read is held by unit tests; this is the sum of them
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


def test_no_side_reads_what_another_brought():
    # GIVEN sides that wait 10 ms for a sample that nobody has read before, one of them 5 ms more
    slow = ColdStore.new(20_000, decode_s=0.005)
    sides = {"slow": slow, "fast": ColdStore(slow.path)}
    loaders = {
        name: DataLoader(data, 4, shuffle=True, num_workers=2) for name, data in sides.items()
    }
    try:
        found = compare(loaders, budget=15, progress=False)
    finally:
        slow.path.unlink()
    # THEN it is 15 / 10 times as fast, and not many times, as what reads from memory is
    assert 1.2 < found.ratios["fast"].value < 2.0
    # AND nothing is noted but what modules of other tests hold
    assert [note for note in found.notes if not re.search("tests\\.|test_", note)] == []
