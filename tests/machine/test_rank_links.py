"""What ranks say to each other, through a store of torch's; whole jobs are in tests/tuning/test_distributed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed import HashStore

from autotune_loader.machine.ranks import Link, Place, RankLostError

HERE = Place.here()
ENDED = replace(HERE, pid=999999999)


@pytest.mark.parametrize(
    ("place", "left", "told"),
    [
        (HERE, None, "rank 1 did not answer within 0 s"),
        (ENDED, None, "rank 1 is gone"),
        (replace(ENDED, node="elsewhere"), None, "rank 1 did not answer within"),  # nothing is known of that machine
        (HERE, "no such bucket", "rank 1 gave up: no such bucket"),
    ],
)
def test_who_waits_for_a_rank_that_says_no_more_is_told_why(place: Place, left: str | None, told: str) -> None:
    # GIVEN a rank that will not answer
    store = HashStore()
    first, second = Link(store, 0, 2), Link(store, 1, 2)
    first.places[1] = place
    if left is not None:
        second.leave(left)
    # WHEN another waits for it
    with pytest.raises(RankLostError, match=told):
        first.wait("answer", 1, int, 0.4)
    # THEN what it had said before still counts, and is forgotten once it is taken
    second.say("answer", [1, 2])
    assert first.take("answer", 1, list[int], 1.0) == [1, 2]
    assert first.heard("answer", 1) is None
