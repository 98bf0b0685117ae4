"""The pages of one request in a pool: taken as they are needed, in the order of what they hold, given back together.

    lease = Lease(pool)
    pages, length = lease.rows(ref)        # for a step that reads `ref.committed` tokens and writes the next ones
    lease.release()                        # or let it go: nothing is left behind

What is committed is said by whoever asks, and a page that is to be read is never one that may be written. So a step can
be run twice, given up, or fail halfway. `Window` works as a ring with one page more than it shows: the next one.

Deliberately absent: reading and writing (`kv`, `residual`).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import CapacityError, StaleError
from ..loop import Append, Page, PoolRef, Window
from .pool import Pool, Storage, page_bytes


class Lease:
    """Pages of a pool, and the versions of the components by which they were filled."""

    def __init__(self, pool: Pool, versions: Mapping[str, int] | None = None) -> None:
        self.pool, self.versions = pool, dict(versions or {})
        self._pages: list[int] = []
        self._order: list[int] = []
        self._row: torch.Tensor | None = None
        self._returned = weakref.finalize(self, pool.give, self._pages)
        self._returned.atexit = False

    @property
    def bytes(self) -> int:
        """Of its pages."""
        return len(self._pages) * page_bytes(self.pool.page)

    def rows(self, ref: PoolRef) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step needs to find its pages: their numbers int32 [1, C], and how many tokens to read, int32 [1].

        The numbers are in the order of what the pages hold; those to be written come after those to be read, and any
        number may follow. Takes pages where they are missing. Raises CapacityError.
        """
        assert ref.page == self.pool.page, f"lease {ref.lease} is of other pages"
        places, length = _places(ref)
        missing = max(places) + 1 - len(self._pages)
        if missing > 0:
            self._pages.extend(self.pool.take(missing))
        order = [self._pages[place] for place in places]
        if self._row is None or order != self._order:
            padding = [order[0]] * (capacity(ref.keep, ref.page) - len(order))
            self._row = torch.tensor([order + padding], dtype=torch.int32).to(self.pool.device)
            self._order = order
        return self._row, torch.full((1,), length, dtype=torch.int32, device=self.pool.device)

    def require_current(self, uses: Sequence[str], version: Callable[[str], int]) -> None:
        """Raise StaleError if a component that filled pages has changed since; those of `uses` do from now on."""
        for name, known in self.versions.items():
            if version(name) != known:
                raise StaleError(
                    f"the weights of {name} have changed since this request filled its cache with them",
                    value=f"version {known}, now {version(name)}",
                    remedy="start the request anew",
                )
        for name in uses:
            self.versions.setdefault(name, version(name))

    def export(self) -> Storage:
        """A copy of its pages, to be given to `fill`."""
        return {name: tensor[self._pages] for name, tensor in self.pool.storage.items()}

    def fill(self, contents: Storage) -> None:
        """Take as many pages as were exported, with the same contents. Raises CapacityError."""
        count = len(next(iter(contents.values())))
        self._pages.extend(self.pool.take(count))
        for name, tensor in self.pool.storage.items():
            tensor[self._pages] = contents[name]

    def release(self) -> None:
        """Give its pages back. It is of no use afterwards."""
        self._returned()


def capacity(keep: Append | Window, page: Page) -> int:
    """How many page numbers a row has: for all lengths the same, and a power of two for leases of any limit."""
    if isinstance(keep, Window):
        return keep.sinks + keep.last + 1
    return 1 << (-(-keep.limit // page.tokens) - 1).bit_length()


def _places(ref: PoolRef) -> tuple[Sequence[int], int]:
    """Which of the lease's pages a step sees, in order, and how many tokens in them there are to read."""
    page, keep, end = ref.page.tokens, ref.keep, ref.committed + ref.new
    if isinstance(keep, Window):
        assert ref.committed % page == 0 and ref.new == page, "a window moves by whole pages"
        chunk = ref.committed // page
        first = max(chunk - keep.last, min(chunk, keep.sinks))
        seen = [*range(min(chunk, keep.sinks)), *range(first, chunk)]
        return [_ring(i, keep) for i in [*seen, chunk]], len(seen) * page
    if end > keep.limit:
        raise CapacityError(
            f"lease {ref.lease} is for at most {keep.limit} tokens", value=end, remedy="ask for fewer tokens"
        )
    return range(-(-end // page)), ref.committed


def _ring(chunk: int, keep: Window) -> int:
    """The place of a chunk: sinks keep theirs, the others take turns."""
    return chunk if chunk < keep.sinks else keep.sinks + (chunk - keep.sinks) % (keep.last + 1)
