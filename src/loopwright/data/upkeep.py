"""Care of a cache of encodings: what is not right in it, what nobody needs, how much room it takes.

    verify(cache, needed)         # nothing is changed: encoding again redoes what is missing or wrong
    unneeded(cache, needed)       # list first, then `remove`

`needed` are the files of a data set's rows (`Encodings.keys`). A cache may serve several data sets and shapes: what one
of them does not need, another may.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .cache import Cache, EntryError, check, size_of

Tell = Callable[[int, int], None]


@dataclass(slots=True)
class Verified:
    """How many entries are right, the files that are needed and missing, and a line for each that is wrong."""

    right: int = 0
    missing: list[Path] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(cache: Cache, needed: Collection[Path], tell: Tell = lambda done, total: None) -> Verified:
    """Read every entry of the cache, needed or not."""
    files = list(cache.files())
    found = Verified(missing=sorted(set(needed) - set(files)))
    for done, path in enumerate(files, 1):
        try:
            check(path)
            found.right += 1
        except EntryError as error:
            found.wrong.append(str(error))
        tell(done, len(files))
    return found


def unneeded(cache: Cache, needed: Collection[Path]) -> list[Path]:
    """The entries that are not needed, and what broken-off processes left half written."""
    wanted = set(needed)
    return [*(path for path in cache.files() if path not in wanted), *cache.abandoned()]


def remove(files: Iterable[Path]) -> None:
    """Delete the files; those that are gone already are fine."""
    for path in files:
        path.unlink(missing_ok=True)


def total_bytes(files: Iterable[Path]) -> int:
    """The bytes of the files that exist."""
    return sum(size_of(path)[0] for path in files)
