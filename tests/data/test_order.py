"""Every row as often as epochs, whatever the batch size, the shapes, the ranks and where the run was interrupted."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from loopwright.data.order import Batch, Order, Position, share
from loopwright.errors import StateError

MANY = settings(max_examples=150, deadline=None, phases=(Phase.generate,), derandomize=True)
SHAPES = st.lists(st.sampled_from(["film", "clip", "photo"]), min_size=1, max_size=40)


def order_of(shapes: list[str], batch_size: int = 3, seed: int = 0) -> Order:
    return Order([f"row-{index}" for index in range(len(shapes))], shapes, batch_size, seed)


def run(order: Order, epochs: int, position: Position | None = None) -> list[tuple[Batch, Position]]:
    return list(order.walk(position or order.start(), epochs=epochs))


@MANY
@given(SHAPES, st.integers(1, 9), st.integers(0, 3), st.integers(0, 2**63), st.data())
def test_every_row_is_seen_once_an_epoch_across_any_interruption(
    shapes: list[str], batch_size: int, epochs: int, seed: int, data: st.DataObject
):
    whole = run(order_of(shapes, batch_size, seed), epochs)
    stop = data.draw(st.integers(0, len(whole)))
    position = whole[stop - 1][1] if stop else order_of(shapes, batch_size, seed).start()
    rest = run(order_of(shapes, batch_size, seed), epochs, Position(position.epoch, position.offset, position.digest))
    assert whole[:stop] + rest == whole
    seen = Counter(row for batch, _ in whole[:stop] + rest for row in batch)
    assert seen == Counter({row: epochs for row in range(len(shapes)) if epochs})


@MANY
@given(SHAPES, st.integers(1, 9), st.integers(0, 5))
def test_a_batch_has_one_shape_and_only_the_last_of_a_shape_is_smaller(shapes: list[str], batch_size: int, epoch: int):
    batches = order_of(shapes, batch_size).epoch(epoch)
    assert all(len({shapes[row] for row in batch}) == 1 for batch in batches)
    for shape, count in Counter(shapes).items():
        sizes = [len(batch) for batch in batches if shapes[batch[0]] == shape]
        assert sorted(sizes, reverse=True)[: count // batch_size] == [batch_size] * (count // batch_size)
        assert len(sizes) == -(-count // batch_size)


@MANY
@given(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True), st.integers(1, 8))
def test_ranks_share_a_batch_evenly_and_no_row_counts_twice(batch: list[int], ranks: int):
    shares = [share(tuple(batch), rank, ranks) for rank in range(ranks)]
    assert sorted(row for one in shares for row in one.rows[: one.real]) == sorted(batch)
    assert {len(one.rows) for one in shares} == {-(-len(batch) // ranks)}
    assert max(one.real for one in shares) - min(one.real for one in shares) <= 1
    assert all(set(one.rows) <= set(batch) for one in shares), "fillers have the batch's shape"


def test_epochs_and_seeds_shuffle_differently_and_shapes_are_mixed():
    order = order_of(["film", "photo"] * 50)
    orders = {tuple(one.epoch(epoch)) for one in (order, order_of(["film", "photo"] * 50, seed=1)) for epoch in (0, 1)}
    assert len(orders) == 4
    shapes = [order.shapes[batch[0]] for batch in order.epoch(0)]
    assert sum(a != b for a, b in itertools.pairwise(shapes)) > 8


def test_every_row_comes_early_as_often_as_late():
    order = order_of(["film"] * 10, batch_size=1)
    places = Counter(order.epoch(epoch).index((3,)) for epoch in range(1000))
    assert set(places) == set(range(10)) and all(60 < count < 140 for count in places.values())


def test_the_order_is_the_same_on_every_machine():
    assert order_of(["film", "photo", "film", "film", "photo"], 2, 7).epoch(3) == [(1, 4), (0, 3), (2,)]


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 4}, {"names": ["row-0", "other"]}, {"shapes": ["film", "photo"]}]
)
def test_another_order_is_not_continued(change: dict):
    order = order_of(["film", "film"])
    with pytest.raises(StateError, match=r"another order.*batch size and seed it began with"):
        replace(order, **change).walk(order.start(), epochs=1)
