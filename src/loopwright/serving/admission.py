"""How many requests may be under way, in all and for one key.

with admission.admit("alice", 1):
    ...
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .refusal import Refusal
from .settings import Limits


class Admission:
    """On the event loop alone. `soonest` says in how many seconds a place may become free."""

    def __init__(self, limits: Limits, soonest: Callable[[], float]) -> None:
        self._limits, self._soonest = limits, soonest
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    @contextmanager
    def admit(self, owner: str, count: int) -> Iterator[None]:
        """Hold so many places. Raises Refusal where there are none."""
        self.enter(owner, count)
        try:
            yield
        finally:
            self.leave(owner, count)

    def enter(self, owner: str, count: int, *, known: bool = False) -> None:
        """Take places until `leave`; those who are `known`, because they had one before a restart, are not refused."""
        if not known:
            self.require(owner, count)
        self._held[owner] += count

    def leave(self, owner: str, count: int) -> None:
        """Give places back."""
        self._held[owner] -= count
        if not self._held[owner]:
            del self._held[owner]

    def require(self, owner: str, count: int) -> None:
        """Raise Refusal unless there are so many places now; another one where there never are."""
        for what, held, most in (
            ("the queue is full", len(self), self._limits.queue),
            ("too many requests under way for this key", self._held[owner], self._limits.concurrent),
        ):
            if count > most:
                raise Refusal(f"too many at once: {count}; at most {most} here", code="too_large", param="n")
            if held + count > most:
                wait = self._soonest()
                raise Refusal(
                    f"{what}: {held} of {most}, and {count} more asked for; try again in {max(1, round(wait))} s",
                    status=429,
                    code="queue_full",
                    retry_after=wait,
                )
