"""Looks through a data set and tells everything that is wrong with it, and what is in it.

    report = check("clips/rows.jsonl", parse(["480x832x81"]), tell=print)
    report.problems          # DataErrors, each with its place
    report.buckets           # how many rows at which shape

With shapes given, each row is decoded as training would, so what passes here will train, with a model that takes first
frames where rows name them; without, pictures whole and videos up to their middle.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DataError
from ..media import Extent
from .buckets import nearest
from .dataset import entries
from .decode import measure, pixels
from .geometry import Geometry
from .row import Row

Tell = Callable[[int, int], None]


@dataclass(slots=True)
class Report:
    """What is wrong, and counts of what is not: rows by kind, by (height, width), by frames and by shape."""

    problems: list[DataError] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    buckets: Counter[Geometry] = field(default_factory=Counter)


def check(path: str | Path, allowed: Sequence[Geometry], *, tell: Tell) -> Report:
    """Look at every row; `tell(done, total)` hears of each entry. Raises nothing for what is wrong with the data."""
    declared = list(entries(path))
    report = Report()
    seen: dict[str, Row] = {}
    for done, entry in enumerate(declared, 1):
        if isinstance(entry, DataError):
            report.problems.append(entry)
        else:
            _look(entry, allowed, report)
            with _noting(report):
                _refuse_twin(entry, seen)
        tell(done, len(declared))
    return report


@contextmanager
def _noting(report: Report) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        report.problems.append(error)


def _look(row: Row, allowed: Sequence[Geometry], report: Report) -> None:
    """Into each of its files, whatever is wrong with the others."""
    report.problems.extend(row.problems())
    for condition in row.conditions:
        with _noting(report):
            shown = row.shown(condition)
            pixels(shown, _as_it_is(measure(shown)))
    with _noting(report):
        _count(row, allowed, report)


def _count(row: Row, allowed: Sequence[Geometry], report: Report) -> None:
    extent = measure(row)
    report.kinds[row.kind] += 1
    report.sizes[extent.height, extent.width] += 1
    report.lengths[extent.frames] += 1
    shape = nearest(row, extent, allowed) if allowed else _as_it_is(extent)
    pixels(row, shape)
    if allowed:
        report.buckets[shape] += 1


def _as_it_is(extent: Extent) -> Geometry:
    """Decodes a picture, or a video up to its middle."""
    return Geometry(extent.height, extent.width, 1)


def _refuse_twin(row: Row, seen: dict[str, Row]) -> None:
    """The same bytes twice weigh double in training, and nobody means that."""
    first = seen.setdefault(row.content, row)
    if first is not row:
        raise DataError(row.where, "the same media as in another row", value=str(row.path), remedy=f"see {first.where}")
