"""Bytes for requests: a ledger that promises no more than there is.

    ledger = Ledger(total_bytes("cuda"))
    ledger.set_aside("weights", 3 * 2**30)
    ledger.require(need)                            # CapacityError: never
    ledger.reserve(job.id, need)                    # False: not now
    ledger.refund(job.id)

What requests hold adds up, and so do weights and captured graphs; of what calls need while they run, the largest
counts, because one call runs at a time. Deliberately absent: reading the device's own counters, which tell only what
has already happened; and what a request needs, which `sizes` finds out.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from ..errors import CapacityError


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. `resident` is held from first to last step, `peak` is what the largest call takes on top, a row."""

    resident: int
    peak: int

    @property
    def total(self) -> int:
        """What the request needs to run alone."""
        return self.resident + self.peak


class Ledger:
    """What is promised to whom, of `capacity` bytes less what is set aside for good. Safe from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._aside: dict[Hashable, Callable[[], int]] = {}
        self._needs: dict[str, Need] = {}
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """Bytes that requests, and what serves them, have between them."""
        return self._capacity - sum(count() for count in list(self._aside.values()))

    @property
    def serving(self) -> bool:
        """Whether requests hold anything; graphs, which can be dropped, are no requests."""
        return any(not holder.startswith("graph:") for holder in list(self._needs))

    def set_aside(self, what: Hashable, count: int | Callable[[], int]) -> None:
        """Bytes that are no request's, such as weights: so many for good, or as many as `count` says at the time."""
        with self._lock:
            self._aside[what] = count if callable(count) else lambda: count

    def spare(self, what: Hashable, count: int) -> bool:
        """Set so many bytes aside if nobody has been promised them."""
        with self._lock:
            if self.reserved + count > self.room:
                return False
            self._aside[what] = lambda: count
            return True

    def rename(self, what: Hashable, name: Hashable) -> None:
        """What was set aside for the one is for the other."""
        with self._lock:
            if what in self._aside:
                self._aside[name] = self._aside.pop(what)

    def give_back(self, what: Hashable) -> None:
        """What was set aside is for requests again; nothing if nothing was."""
        with self._lock:
            self._aside.pop(what, None)

    @property
    def reserved(self) -> int:
        """Bytes promised at present."""
        return sum(need.resident for need in self._needs.values()) + self._peak(self._needs.values())

    def require(self, need: Need) -> None:
        """Raise CapacityError if there will never be room for it."""
        if need.total > self.room:
            raise CapacityError(
                f"this request needs {gib(need.total)}, requests have {gib(self.room)} on this device",
                remedy="ask for a smaller size or fewer frames",
            )

    def reserve(self, holder: str, need: Need) -> bool:
        """Promise it if there is room now."""
        with self._lock:
            peak = max(need.peak, self._peak(self._needs.values()))
            if sum(other.resident for other in self._needs.values()) + need.resident + peak > self.room:
                return False
            self._needs[holder] = need
            return True

    def refund(self, holder: str) -> None:
        """Take back what was promised; nothing if nothing was."""
        with self._lock:
            self._needs.pop(holder, None)

    def rows(self, holder: str) -> int:
        """How many rows a call of the holder's may have beside all that is held: at least one."""
        with self._lock:
            left = self.room - sum(need.resident for need in self._needs.values())
            return max(1, left // max(1, self._needs[holder].peak))

    def _peak(self, needs: Iterable[Need]) -> int:
        return max((need.peak for need in needs), default=0)


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
