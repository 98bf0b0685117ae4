"""Every row as often as there are epochs, over any batch size, accumulation, processes and interruption."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from loopwright.data.filling import Filled
from loopwright.data.order import Order, Position
from loopwright.errors import DataError
from loopwright.training.feed import Feed, Step, prepare

MANY = settings(max_examples=60, deadline=None, phases=(Phase.generate,), derandomize=True)


class Samples:
    """Stands in for encodings: a row's latent is its own number."""

    def sample(self, row: int) -> dict[str, torch.Tensor]:
        return {"latent": torch.tensor([float(row)]), "cond": torch.zeros(1)}


def feeds(shapes: list[str], batch_size: int, parts: int, ranks: int) -> list[Feed]:
    """The feed of every process."""
    order = Order([f"row-{index}" for index in range(len(shapes))], shapes, batch_size, seed=3)
    groups = [SimpleNamespace(rank=rank, ranks=ranks, device=torch.device("cpu")) for rank in range(ranks)]
    return [Feed(Samples(), range(len(shapes)), order, group, parts) for group in groups]


def taken(feed: Feed, epochs: int, position: Position | None = None, most: int = 10**9) -> list[Step]:
    steps = []
    for step in feed.steps(position or feed.order.start(), epochs):
        if len(steps) == most:
            break
        steps.append(step)
    return steps


@MANY
@given(
    st.lists(st.sampled_from(["film", "photo"]), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.data(),
)
def test_every_row_counts_once_an_epoch(shapes, batch_size, parts, ranks, epochs, data):
    whole = taken(feeds(shapes, batch_size, parts, 1)[0], epochs)
    stop = data.draw(st.integers(0, len(whole)))
    seen: Counter[float] = Counter()
    for feed in feeds(shapes, batch_size, parts, ranks):
        before = taken(feed, epochs, most=stop)
        after = taken(feed, epochs, before[-1].after if before else None)
        assert [step.after for step in before + after] == [step.after for step in whole]
        for step in before + after:
            for batch in step.parts:
                seen.update(batch.tensors["latent"][: batch.real, 0].tolist())
    assert seen == Counter({row: epochs for row in range(len(shapes)) if epochs})


@MANY
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_processes_have_equally_many_batches_of_equal_shape_and_places_are_those_of_one(count, size, parts, ranks):
    steps = [taken(feed, 1) for feed in feeds(["film"] * count, size, parts, ranks)]
    (alone,) = (taken(feed, 1) for feed in feeds(["film"] * count, size, parts, 1))
    for index, one in enumerate(alone):
        ours = [each[index] for each in steps]
        assert {step.rows for step in ours} == {one.rows}
        assert len({tuple(batch.tensors["latent"].shape for batch in step.parts) for step in ours}) == 1
        for part, batch in enumerate(one.parts):
            found = {
                place: row
                for step in ours
                for place, row in zip(step.parts[part].places, step.parts[part].tensors["latent"], strict=True)
            }
            assert found == dict(zip(batch.places, batch.tensors["latent"], strict=True))
            assert sum(step.parts[part].real for step in ours) == batch.real == len(batch.places)


class Thread:
    """Stands in for one of several processes."""

    def __init__(self, rank: int, shared: list[torch.Tensor], barrier: Barrier) -> None:
        self.rank, self.ranks, self.first, self._shared, self._barrier = rank, len(shared), rank == 0, shared, barrier

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared[self.rank] = tensor
        self._barrier.wait(60)
        out = torch.stack(self._shared).sum(0)
        self._barrier.wait(60)
        return out


def test_rows_that_cannot_be_encoded_end_all_processes_with_the_same_words():
    def encoding(rank: int) -> SimpleNamespace:
        problems = [DataError(f"rows.jsonl:{rank}", f"row {rank} is \u201cno video\u201d")] * rank
        return SimpleNamespace(fill=lambda rows, tell: Filled({}, problems), prompt=lambda text: None)

    shared, barrier = [torch.empty(0)] * 3, Barrier(3)

    def process(rank: int) -> str:
        with pytest.raises(DataError) as error:
            prepare(encoding(rank), [1, 2, 3], Thread(rank, shared, barrier))
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        told = set(pool.map(process, range(3)))
    words = "rows.jsonl:1: row 1 is \u201cno video\u201d; 3 in all; loopwright encode lists them"
    assert told == {words}
