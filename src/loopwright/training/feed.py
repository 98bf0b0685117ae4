"""Batches of a data set's encodings for one process of a group, in an order that resumes exactly.

    feed = Feed(encodings, rows, order, group, parts=2)
    for step in feed.steps(order.start(), epochs=10):
        step.parts              # this process's batches: one for each accumulated part
        step.rows               # how many rows count, over all processes and parts
        step.after              # where to continue after it

The next step is read from the disk while one is computed. Rows are encoded before (`prepare`), so none is here.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import torch

from ..data.encodings import Encodings
from ..data.filling import FOUND, Filled, Tell
from ..data.order import Order, Position, share
from ..data.row import Row
from ..distributed.group import Group
from ..errors import DataError
from .methods import Batch

_LONGEST = 4096  # bytes of a problem that other processes hear


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimiser step is made of; `metrics` are of how that came to be."""

    parts: tuple[Batch, ...]
    rows: int
    after: Position
    metrics: Mapping[str, float] = field(default_factory=dict)


class Batches(Protocol):
    """Steps in an order that resumes exactly, for one process of a group."""

    def start(self) -> Position:
        """Before the first step."""

    def check(self, position: Position) -> None:
        """Raise StateError for a position in another order."""

    def steps(self, position: Position, epochs: int) -> Iterator[Step]:
        """Every step left of so many epochs. Raises StateError for a position in another order."""


@dataclass(frozen=True)
class Feed:
    """The rows of a data set, as `order` has them. `parts` is how many batches a step is accumulated from, or fewer
    where it has fewer rows."""

    encodings: Encodings
    rows: Sequence[Row]
    order: Order
    group: Group
    parts: int = 1

    def start(self) -> Position:
        """Before the first step."""
        return self.order.start()

    def check(self, position: Position) -> None:
        """Raise StateError for a position in another order."""
        self.order.walk(position, epochs=0)

    def steps(self, position: Position, epochs: int) -> Iterator[Step]:
        """Every step left of so many epochs. Raises StateError for a position in another order."""
        walk = iter(self.order.walk(position, epochs=epochs))
        with ThreadPoolExecutor(1) as reader:
            pending = reader.submit(self._next, walk)
            while (step := pending.result()) is not None:
                pending = reader.submit(self._next, walk)
                yield replace(step, parts=tuple(map(self._placed, step.parts)))

    def _next(self, walk: Iterator[tuple[tuple[int, ...], Position]]) -> Step | None:
        for batch, after in walk:
            parts = min(self.parts, len(batch))
            places = [tuple(range(part, len(batch), parts)) for part in range(parts)]
            return Step(tuple(self._batch(batch, each) for each in places), len(batch), after)
        return None

    def _batch(self, batch: tuple[int, ...], places: tuple[int, ...]) -> Batch:
        mine = share(places, self.group.rank, self.group.ranks)
        rows = [batch[place] for place in mine.rows]
        samples = [self.encodings.sample(self.rows[row]) for row in rows]
        stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return Batch(stacked, tuple(self.order.names[row] for row in rows), mine.rows, mine.real)

    def _placed(self, batch: Batch) -> Batch:
        return replace(batch, tensors={name: t.to(self.group.device) for name, t in batch.tensors.items()})


@dataclass(frozen=True, slots=True)
class Prepared:
    """What it took to have all encodings: entries that were not in the cache, over all processes, and the seconds."""

    misses: int
    seconds: float


def prepare(encodings: Encodings, rows: Sequence[Row], group: Group, tell: Tell = lambda done, total: None) -> Prepared:
    """Encode what the cache lacks, each process a part of the rows, and the empty prompt.

    The encoders are loaded only where something is missing, and let go of with `encodings`. Raises DataError for a row
    that cannot be encoded, in every process.
    """
    begun = perf_counter()
    filled = encodings.fill(rows[group.rank :: group.ranks], tell)
    if group.first:
        encodings.prompt("")
    counts = torch.tensor([_missed(filled), len(filled.problems)])
    missed, wrong = map(int, group.total(counts))
    if wrong:
        where, problem = _first(filled.problems, group)
        raise DataError(where, problem, remedy=f"{wrong} in all; loopwright encode lists them")
    return Prepared(missed, perf_counter() - begun)


def _first(problems: Sequence[DataError], group: Group) -> tuple[str, str]:
    """Where the first problem of the first process that has some is, and what: the same in every process."""
    have = torch.zeros(group.ranks, dtype=torch.int64)
    have[group.rank] = len(problems)
    text = torch.zeros(_LONGEST, dtype=torch.int64)
    if group.rank == int(group.total(have).nonzero()[0]):
        written = f"{problems[0].where}\n{problems[0].problem}".encode()[:_LONGEST]
        text[: len(written)] = torch.tensor(list(written))
    told = bytes(group.total(text).tolist()).rstrip(b"\0").decode(errors="ignore")
    where, _, problem = told.partition("\n")
    return where, problem


def _missed(filled: Filled) -> int:
    return sum(number for (_, outcome), number in filled.count().items() if outcome != FOUND)
