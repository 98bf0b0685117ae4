"""Batches that a run's own Python file makes while training, on the device: no data set, no cache, no waiting.

    # feeds.py: a function that is given the device and the run's options
    def circles(device, *, size=64): return Circles(device, size)

    drawn = Drawn("feeds.py", "circles", {"size": 32})
    feed = DrawnFeed(opened(drawn, device), group, rows=256, parts=1, seed=0, name=identity(drawn))
    for step in feed.steps(feed.start(), epochs=1): ...

The numbers of a step come from a generator that belongs to seed, step, part and process, so a continued run sees what
it would have seen. What a source prepares once, it keeps itself. Deliberately absent: epochs, and batches of other
shapes for other processes.
"""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol, cast

import torch

from ..data.order import Position
from ..distributed.group import Group
from ..errors import RequestError, StateError
from .feed import Step
from .methods import Batch
from .noise import generator, seeded

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A source of batches: function `source` of a Python file, called with the device and these options.

    The file's folder can be imported from.
    """

    file: str
    source: str
    options: Mapping[str, str | int | float] = field(default_factory=dict)


class Source(Protocol):
    """What the function returns. `blank` [L, D] is the empty prompt's embeddings; None where no caption is dropped."""

    blank: torch.Tensor | None

    def batch(self, step: int, rows: int, generator: torch.Generator) -> Tensors:
        """So many rows on the device, random by the generator alone; which shape they have may depend on the step."""

    def held_out(self) -> Sequence[Tensors]:
        """Batches that are never trained on, always the same."""


def function(drawn: Drawn) -> Callable[..., Source]:
    """The function that makes the source. Raises RequestError where there is none, or it takes other options."""
    path = Path(drawn.file)
    if not path.is_file():
        raise RequestError("drawn.file is missing", value=drawn.file, remedy="paths are relative to the present folder")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, drawn.source, None)
    if not callable(found):
        choices = [name for name, item in vars(module).items() if callable(item) and not name.startswith("_")]
        raise RequestError(f"{drawn.file} has no such function", value=drawn.source, choices=choices)
    signature = inspect.signature(found)
    try:
        signature.bind("device", **drawn.options)
    except TypeError as error:
        message = f"drawn.options: {drawn.source} is not called so ({error})"
        raise RequestError(message, value=dict(drawn.options), choices=[*signature.parameters][1:]) from error
    return cast(Callable[..., Source], found)


def opened(drawn: Drawn, device: torch.device) -> Source:
    """The source, on the device."""
    return function(drawn)(device, **drawn.options)


def identity(drawn: Drawn) -> str:
    """What tells one source from another."""
    return json.dumps([drawn.file, drawn.source, dict(drawn.options)], sort_keys=True)


def each(rows: int, ranks: int, parts: int) -> int:
    """How many of a step's rows a process draws at once. Raises RequestError where they are not shared out evenly."""
    if rows % (ranks * parts):
        remedy = f"make batch_size a multiple of {ranks * parts}, of processes times accumulate"
        raise RequestError("drawn rows are shared out evenly", value=rows, remedy=remedy)
    return rows // (ranks * parts)


@dataclass(frozen=True)
class DrawnFeed:
    """A source's batches for one process of a group, `rows` of them a step over all processes and `parts`."""

    source: Source
    group: Group
    rows: int
    parts: int
    seed: int
    name: str

    def __post_init__(self) -> None:
        each(self.rows, self.group.ranks, self.parts)

    def start(self) -> Position:
        """Before the first step."""
        return Position(0, 0, sha256(repr((self.name, self.rows, self.seed)).encode()).hexdigest())

    def check(self, position: Position) -> None:
        """Raise StateError for a position in other batches."""
        if position.digest != self.start().digest:
            remedy = "resume with the source, options, batch size and seed it began with, or begin anew"
            raise StateError("the run to resume drew other batches", value=position.digest, remedy=remedy)

    def steps(self, position: Position, epochs: int) -> Iterator[Step]:
        """Without end, from there on."""
        self.check(position)
        index = position.offset
        while True:
            parts = tuple(self._batch(index, part) for part in range(self.parts))
            index += 1
            yield Step(parts, self.rows, Position(0, index, position.digest))

    def _batch(self, step: int, part: int) -> Batch:
        rows = each(self.rows, self.group.ranks, self.parts)
        first = (part * self.group.ranks + self.group.rank) * rows
        source = generator("drawn", self.seed, step, part, self.group.rank)
        tensors = self.source.batch(step, rows, seeded(self.group.device, source))
        return Batch(tensors, (), tuple(range(first, first + rows)), rows)


@dataclass(frozen=True)
class HeldOut:
    """What a source holds out, the same in every process."""

    source: Source

    def start(self) -> Position:
        """Before the first batch."""
        return Position(0, 0, "")

    def check(self, position: Position) -> None:
        """There is one order alone."""

    def steps(self, position: Position, epochs: int) -> Iterator[Step]:
        """Each batch once."""
        for index, tensors in enumerate(self.source.held_out()):
            rows = len(next(iter(tensors.values())))
            names = tuple(f"{index}/{row}" for row in range(rows))
            yield Step((Batch(tensors, names, tuple(range(rows)), rows),), rows, Position(0, index + 1, ""))
