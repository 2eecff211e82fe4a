"""Index batches of an epoch: order, seeds and generators of a plain DataLoader; positions that are taken up again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from autotune_loader.live.order import Order, Source, drawn_again
from autotune_loader.live.seeds import LoopSeeds, draws_nothing, mixed
from tests.support.schedules import SAMPLERS, Case, arguments, states


def a_case(sampler: str, kind: str = "batch_sampler") -> dict[str, Any]:
    """Arguments of a loader, and a known state of every generator."""
    none: dict[str, Any] = {"asked": {}, "changes": {}, "leaves": {}, "draws": False}
    asked = arguments(Case(seed=4, kind=kind, sampler=sampler, samples=23, batch_size=4, epochs=1, **none))
    seed_all()
    return asked


def seed_all(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def source_of(asked: dict[str, Any]) -> Source:
    return Source(sampler=asked.get("batch_sampler") or asked["sampler"], generator=asked.get("generator"))


def delivered(order: Order) -> Iterator[Any]:
    for item in order:
        order.in_hand.clear()
        yield item


@pytest.mark.parametrize("kind", ["batch_sampler", "unbatched"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_indices_and_generators_are_those_of_a_plain_loader(sampler: str, kind: str) -> None:
    asked = a_case(sampler, kind)
    plain = [torch.as_tensor(batch)[..., 0].tolist() for batch in DataLoader(**asked)]
    plain_states = states(asked.get("generator"))

    asked = a_case(sampler, kind)
    order = Order(source_of(asked))

    assert [list(item[2]) if kind == "batch_sampler" else item[2] for item in delivered(order)] == plain
    assert states(asked.get("generator")) == plain_states


def test_batches_in_hand_are_given_out_again_first_and_in_order() -> None:
    order = Order(Source(sampler=SequentialSampler(range(6)), generator=None))
    for _ in range(4):
        next(order)
    del order.in_hand[1]

    assert order.position() == (2, [0])
    assert order.put_back() == 3
    assert order.has_more  # to ask loses nothing
    assert [item[0] for item in order] == [0, 2, 3, 4, 5]
    assert not order.has_more


class Chance:
    """Draws each batch when it is asked for it."""

    def __init__(self, own: random.Random | None = None) -> None:
        self.draw = random.random if own is None else own.random

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(100 * self.draw())] for _ in range(20))


@pytest.mark.parametrize(("sampler", "listens"), [(Chance(), True), (Chance(random.Random(1)), False)])
def test_a_sampler_that_draws_from_what_the_training_draws_from_is_found_out(sampler: Any, listens: bool) -> None:
    order = Order(Source(sampler=sampler, generator=None, workers=1, ahead=2))
    for _ in range(4):
        next(order)

    assert order.listens is listens


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_position_is_taken_up_again_and_leaves_the_random_state_alone(sampler: str) -> None:
    source = source_of(a_case(sampler))
    order = Order(source)
    items = [next(order) for _ in range(3)]
    del order.in_hand[items[0][0]], order.in_hand[items[2][0]]
    delivered, missing = order.position()
    state = {"begun_with": order.begun_with, "draws_seed": True, "seed": order.seed}
    rest = [items[1], *order]

    seed_all(99)
    before = states()
    again = drawn_again(source, {**state, "delivered": delivered, "missing": missing})

    assert (delivered, missing) == (3, [1])
    assert states() == before
    assert again.delivered == 2
    assert list(again) == rest
    assert again.delivered == 2
    with pytest.raises(ValueError, match="ends after"):
        Order(source).pass_over(99, [])


def test_the_loops_own_random_state_is_put_back() -> None:
    seed_all()
    np.random.normal()  # leaves a second number in the generator's hands
    before, seeds, noted = states(), LoopSeeds(), list[Any]()
    for number in range(9):
        seeds.begin(7, number)
        noted.append((random.random(), np.random.normal(), torch.rand(()).item()))
        seeds.end()
        seeds.end()
    assert states() == before
    assert len(set(noted)) == 9

    # WHEN another thread fetches, beside which the training draws THEN nothing is seeded
    other = threading.Thread(target=lambda: (seeds.begin(7, 0), noted.append(states()), seeds.end()))
    other.start()
    other.join()
    assert noted[-1] == before


ROWS = torch.zeros(4, 2)


class Own(TensorDataset):
    pass


@pytest.mark.parametrize(
    ("dataset", "collate", "is_plain"),
    [
        *((plain, default_collate, True) for plain in (ROWS, ROWS.numpy(), [1], Subset(TensorDataset(ROWS), [0]))),
        *((own, default_collate, False) for own in (Own(ROWS), Subset(Own(ROWS), [0]), type("Noisy", (list,), {})())),
        (ROWS, len, False),
    ],
)  # fmt: skip
def test_plain_data_need_no_seeds_and_code_of_the_users_does(dataset: Any, collate: Any, is_plain: bool) -> None:
    assert draws_nothing(dataset, collate) is is_plain


def test_neighbouring_batches_and_epochs_have_seeds_far_apart() -> None:
    seeds = {mixed(epoch, number) for epoch in range(50) for number in range(200)}

    assert len({seed >> 32 for seed in seeds}) > 9990
