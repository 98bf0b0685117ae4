"""Memory in pages that requests lease: allocated once, at an address that stays, shared by all who need such pages.

    pools = Pools(limit=2**30)
    pool = pools.get("cuda", kv_page(layers=24, tokens=16, heads=8, dims=64))
    pages = pool.take(3)
    pool.storage["k"][pages[0]]
    pool.give(pages)

Deliberately absent: whose a page is (`lease`), what is in it (`kv`, `residual`), and clearing it: nobody reads what he
has not written.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from math import prod

import torch

from ..errors import CapacityError
from ..loop import Page

Storage = Mapping[str, torch.Tensor]


class Pool:
    """`count` pages on a device; `storage` holds them on dim 0 of each of the page's tensors. Safe from any thread."""

    def __init__(self, page: Page, count: int, device: str) -> None:
        self.page, self.count, self.device = page, count, device
        self.storage: Storage = {
            name: torch.empty(count, *shape, dtype=getattr(torch, dtype), device=device)
            for name, shape, dtype in page.tensors
        }
        self._free = deque(range(count))
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Pages nobody has."""
        return len(self._free)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the pages nobody has."""
        return self.free * page_bytes(self.page)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the pages that requests have."""
        return (self.count - self.free) * page_bytes(self.page)

    def take(self, wanted: int) -> list[int]:
        """So many pages, or none. Raises CapacityError."""
        with self._lock:
            if wanted > len(self._free):
                raise CapacityError(
                    f"a pool of {self.count} pages on {self.device} has too few left",
                    value=f"{wanted} needed, {len(self._free)} free",
                    remedy="run fewer or shorter requests at once, or give pools more memory",
                )
            return [self._free.popleft() for _ in range(wanted)]

    def give(self, pages: Iterable[int]) -> None:
        """Pages come back. Takes no lock: a lease may be collected while this thread is in `take`."""
        self._free.extend(pages)


class Pools:
    """The pools of a process, one for each device and kind of page, made when first asked for. `limit` bytes each."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pools: dict[tuple[str, Page], Pool] = {}
        self._lock = threading.Lock()

    def get(self, device: str, page: Page) -> Pool:
        """The pool of such pages. Raises CapacityError if not one of them fits."""
        with self._lock:
            pool = self._pools.get((device, page))
            if pool is None:
                count = self.limit // page_bytes(page)
                if not count:
                    raise CapacityError(
                        f"a page needs {page_bytes(page)} bytes, a pool has {self.limit}",
                        remedy="give pools more memory",
                    )
                pool = self._pools[device, page] = Pool(page, count, device)
            return pool

    def idle_bytes(self, device: str) -> int:
        """Bytes that pools hold on the device for nobody."""
        return sum(pool.idle_bytes for pool in list(self._pools.values()) if pool.device == device)

    def __iter__(self) -> Iterator[Pool]:
        return iter(list(self._pools.values()))


def page_bytes(page: Page) -> int:
    """Bytes of one page."""
    return sum(prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in page.tensors)
