"""Index batches of an epoch, and random numbers of a batch: those of a plain DataLoader, in whatever process."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset, default_collate

from autotune_loader.autoloader.order import Order
from autotune_loader.autoloader.seeds import Seeds, draws_nothing, mixed
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


def order_of(asked: dict[str, Any]) -> Order:
    return Order(asked.get("batch_sampler") or asked["sampler"], asked.get("generator"))


def delivered(order: Order) -> Iterator[Any]:
    for item in order:
        order.had(item[0])
        yield item


@pytest.mark.parametrize("kind", ["batch_sampler", "unbatched"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_indices_and_generators_are_those_of_a_plain_loader(sampler: str, kind: str) -> None:
    asked = a_case(sampler, kind)
    plain = [torch.as_tensor(batch)[..., 0].tolist() for batch in DataLoader(**asked)]
    plain_states = states(asked.get("generator"))

    asked = a_case(sampler, kind)
    order = order_of(asked)

    assert [list(item[1]) if kind == "batch_sampler" else item[1] for item in delivered(order)] == plain
    assert states(asked.get("generator")) == plain_states


def test_batches_in_hand_are_given_out_again_first_and_in_order() -> None:
    order = Order(SequentialSampler(range(6)))
    for _ in range(4):
        next(order)
    order.had(1)
    order.put_back([3, 0])

    assert [item[0] for item in order] == [0, 3, 4, 5]
    order.put_back(order.in_hand)
    assert [item[0] for item in order] == [0, 2, 3, 4, 5]


def test_a_batch_size_that_is_set_in_mid_epoch_holds_for_what_was_drawn_ahead() -> None:
    sampler = BatchSampler(SequentialSampler(range(20)), 2, False)
    order = Order(sampler)
    seen = [next(order)[1] for _ in range(5)]
    order.had(0)
    order.put_back([2, 3, 4])

    sampler.batch_size = 5
    order.batch_anew()

    assert seen[:2] + [item[1] for item in order] == [[0, 1], [2, 3], *([*range(i, i + 5)] for i in (4, 9, 14)), [19]]


def test_the_loops_own_random_state_is_put_back_and_the_initial_seed_stays() -> None:
    draws, seen = (random.random, random.gauss, np.random.normal, np.random.random, torch.rand), list[Any]()

    def fetch(kinds: Any) -> Any:
        drawn = [
            draws[kind](0, 1) if kind == 1 else draws[kind]() if kind < 4 else torch.rand(()).item() for kind in kinds
        ]
        return (*drawn, torch.initial_seed())

    def training(seeds: Seeds | None) -> list[Any]:
        seed_all(5)
        own = []
        for number in range(40):  # some leave a second Gaussian number in a generator's hands
            own.append(
                (
                    random.gauss(0, 1) if number % 3 else 0,
                    np.random.normal() if number % 2 else 0,
                    torch.rand(()).item(),
                )
            )
            if seeds is not None:
                seen.append(seeds.fetch(fetch, [*range(number % 6)], mixed(7, number), 1234))
        return own

    assert training(Seeds()) == training(None)
    assert {each[-1] for each in seen} == {1234}
    assert len({each[0] for each in seen if len(each) > 1}) == len([each for each in seen if len(each) > 1])
    again = seen.copy()
    seen.clear()
    training(Seeds())
    assert seen == again
    assert torch.initial_seed() == 5


@pytest.mark.parametrize(
    ("held", "draw"),
    [
        (random.Random(1), lambda held: held.random()),
        (np.random.RandomState(1), lambda held: held.normal()),
        (np.random.default_rng(1), lambda held: held.normal()),
        (np.random.Generator(np.random.Philox(1)), lambda held: held.normal()),
        (torch.Generator(), lambda held: torch.rand((), generator=held).item()),
    ],
)
def test_generators_that_are_held_draw_by_batch(held: Any, draw: Any) -> None:
    seeds, drawn = Seeds([held]), list[float]()
    for number in (0, 1, 2, 0, 1):
        seeds.begin(mixed(3, number), 0)
        drawn += [draw(held), draw(held)]

    assert drawn[:4] == drawn[6:]
    assert len(set(drawn)) == 6


def test_where_another_thread_fetches_nothing_is_seeded() -> None:
    from autotune_loader import AutoLoader
    from tests.support.schedules import Noise

    seed_all()
    seen: list[Any] = []
    batches = iter(AutoLoader(Noise(8), batch_size=8, num_workers=0))
    before = states()[1:3]
    thread = threading.Thread(target=lambda: seen.extend(next(batches).tolist()))
    thread.start()
    thread.join()

    seed = torch.Generator().manual_seed(0)
    assert len(seen) == 8
    assert states()[1:3] != before  # the thread draws from what there is, as with DataLoader
    assert seed.initial_seed() == torch.initial_seed()


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
