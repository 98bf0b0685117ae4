"""In which order rows are seen: shuffled anew each epoch, in batches of one shape, and continued exactly.

    order = Order(names, shapes, batch_size=8, seed=7)          # 8 rows a step, over all ranks together
    for batch, after in order.walk(order.start(), epochs=10):   # row numbers, and where to continue after them
        mine = share(batch, rank=0, ranks=4)                    # this rank's rows, as many as every other rank's

Every row comes exactly once an epoch, in a batch of its shape; the last batch of a shape may be smaller, and none is
filled up from another epoch. Resuming needs three values and no generator, because the order is a sort by hashes.
Deliberately absent: reading the rows.
"""

import hashlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import StateError

Batch = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run is: `offset` batches of epoch `epoch` (both from 0) are done, in the order that `digest` names."""

    epoch: int
    offset: int
    digest: str


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a batch. Of `rows` the first `real` count; the rest fill up, and are to weigh nothing.

    So all ranks compute one batch of one shape, as their collectives need, and yet no row counts twice.
    """

    rows: Batch
    real: int


@dataclass(frozen=True)
class Order:
    """The order of rows with these names and shapes. `batch_size` is of all ranks together; equal seeds, equal order.

    `names` identify the rows for `digest`, such as by content; `shapes` say which rows may share a batch.
    """

    names: Sequence[str]
    shapes: Sequence[Hashable]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.shapes) and self.names and self.batch_size > 0

    @cached_property
    def digest(self) -> str:
        """Of all that decides the order."""
        text = hashlib.sha256(repr((self.batch_size, self.seed)).encode())
        for name, shape in zip(self.names, self.shapes, strict=True):
            text.update(repr((name, shape)).encode())
        return text.hexdigest()

    def start(self) -> Position:
        """Before the first batch."""
        return Position(0, 0, self.digest)

    def walk(self, position: Position, *, epochs: int) -> Iterator[tuple[Batch, Position]]:
        """Each batch left of so many epochs, and the position after it.

        Raises StateError for a position in another order: other rows, shapes, batch size or seed.
        """
        if position.digest != self.digest:
            remedy = "resume with the rows, geometry, batch size and seed it began with, or begin anew"
            raise StateError("the run to resume saw its rows in another order", value=position.digest, remedy=remedy)
        return self._walk(position, epochs)

    def _walk(self, position: Position, epochs: int) -> Iterator[tuple[Batch, Position]]:
        for epoch in range(position.epoch, epochs):
            batches = self.epoch(epoch)
            first = position.offset if epoch == position.epoch else 0
            for offset in range(first, len(batches)):
                yield batches[offset], self._after(epoch, offset, len(batches))

    def _after(self, epoch: int, offset: int, length: int) -> Position:
        """The end of an epoch is the beginning of the next."""
        return Position(epoch, offset + 1, self.digest) if offset + 1 < length else Position(epoch + 1, 0, self.digest)

    def epoch(self, epoch: int) -> list[Batch]:
        """The batches of one epoch, each standing where its first row does among the shuffled rows."""
        shuffled = sorted(range(len(self.names)), key=lambda row: _draw(self.seed, epoch, row))
        rows: dict[Hashable, list[int]] = {}
        for row in shuffled:
            rows.setdefault(self.shapes[row], []).append(row)
        place = {row: index for index, row in enumerate(shuffled)}
        return sorted(
            (
                tuple(group[i : i + self.batch_size])
                for group in rows.values()
                for i in range(0, len(group), self.batch_size)
            ),
            key=lambda batch: place[batch[0]],
        )


def share(batch: Batch, rank: int, ranks: int) -> Share:
    """The rows of rank `rank` of `ranks` (from 0): as even as can be, all the same in number."""
    size = -(-len(batch) // ranks)
    mine = batch[rank::ranks]
    return Share((*mine, *itertools.repeat(batch[0], size - len(mine))), len(mine))


def _draw(seed: int, epoch: int, row: int) -> bytes:
    """The same on every machine and with every version of a library, which a generator's shuffle is not."""
    return hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=16).digest()
