"""Goes through rows, finds what a cache lacks of them, and has it made: each encoding once, however many rows share it.

    filled = Filling(rows, plan.of, cache, say, tell).by(pool)
    filled.problems         # the rows that cannot be encoded; none of them hinders another

Rows are looked at as encoders become free, so the first is encoded at once and the progress told is of rows done.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..encoders import SAMPLE
from ..errors import DataError
from .cache import Cache, EntryError
from .pool import Pool
from .row import Row
from .wants import Want

OUTCOMES = FOUND, ENCODED, REDONE = ("found", "encoded", "redone")
Tell = Callable[[int, int], None]
Say = Callable[[str], None]


@dataclass(slots=True)
class Filled:
    """What filling a cache did.

    Attributes:
        files: each entry's file, with its kind and whether it was found, encoded or redone.
        problems: the rows that could not be encoded, in their order.
    """

    files: dict[Path, tuple[str, str]] = field(default_factory=dict)
    problems: list[DataError] = field(default_factory=list)

    def count(self) -> Counter[tuple[str, str]]:
        """How many entries of which kind were found, encoded or redone."""
        return Counter(self.files.values())

    def kinds(self) -> list[str]:
        """The kinds there are: of every row, then of first frames."""
        return [*SAMPLE, *sorted({kind for kind, _ in self.files.values()} - set(SAMPLE))]


class Filling:
    """One pass over rows. `need` gives a row's wants by kind, `tell` hears of rows done, `say` of wrong entries."""

    def __init__(
        self, rows: Sequence[Row], need: Callable[[Row], Mapping[str, Want]], cache: Cache, say: Say, tell: Tell
    ) -> None:
        self._rows, self._need, self._cache, self._say, self._tell = rows, need, cache, say, tell
        self._filled = Filled()
        self._problems: dict[int, DataError] = {}
        self._under_way: dict[Path, list[int]] = {}  # the rows that wait for it
        self._wrong: dict[Path, str] = {}
        self._failed: dict[Path, str] = {}
        self._seen = 0

    def by(self, pool: Pool) -> Filled:
        """Have all of it made by the pool's encoders."""
        for want, problem in pool.make(self._missing()):
            self._settle(want, problem)
        self._tell(len(self._rows), len(self._rows))
        self._filled.problems = [self._problems[index] for index in sorted(self._problems)]
        return self._filled

    def _missing(self) -> Iterator[Want]:
        # begun anywhere, so that processes that fill one cache at once seldom encode the same
        start = random.randrange(len(self._rows)) if self._rows else 0
        for index in (*range(start, len(self._rows)), *range(start)):
            self._told()
            try:
                wants = self._need(self._rows[index])
            except DataError as error:
                self._problems[index] = error
            else:
                yield from (want for want in wants.values() if self._lacks(want, index))
            self._seen += 1

    def _lacks(self, want: Want, index: int) -> bool:
        """Whether somebody has to make it; what is under way or has failed already is this row's business too."""
        path = self._cache.path(want.key)
        if path in self._failed:
            self._blame(index, self._failed[path])
        elif path in self._under_way:
            self._under_way[path].append(index)
        elif path not in self._filled.files and not self._found(want, path):
            self._under_way[path] = [index]
            return True
        return False

    def _found(self, want: Want, path: Path) -> bool:
        try:
            found = self._cache.read(want.key) is not None
        except EntryError as error:
            self._wrong[path] = str(error)
            return False
        if found:
            self._filled.files[path] = want.key.kind, FOUND
        return found

    def _settle(self, want: Want, problem: str) -> None:
        path = self._cache.path(want.key)
        rows = self._under_way.pop(path)
        if problem:
            self._failed[path] = problem
            for index in rows:
                self._blame(index, problem)
        else:
            self._filled.files[path] = want.key.kind, REDONE if path in self._wrong else ENCODED
            if path in self._wrong:
                self._say(f"{self._wrong[path]}; encoded anew")
        self._told()

    def _blame(self, index: int, problem: str) -> None:
        self._problems.setdefault(index, DataError(self._rows[index].where, problem))

    def _told(self) -> None:
        waiting = set(chain.from_iterable(self._under_way.values()))
        self._tell(max(0, self._seen - len(waiting)), len(self._rows))
