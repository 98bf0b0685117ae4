"""The jobs under way on one instance, and the door where others wait while its weights are replaced.

    crew.enter(job)                    # False: not now; it is told to try again
    crew.leave(job)                    # it has ended
    with crew.closed():                # nobody enters
        crew.wait(60.0)                # until nobody is inside

Safe from any thread. Jobs that nobody has any more are not waited for.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..errors import StateError

_LOOK = 0.05  # seconds; a job that is gone does not say so


class Member(Protocol):
    """A job, as its crew knows it. `follows`: it goes on with other weights in the middle."""

    follows: bool

    def resume(self) -> None:
        """Try again to enter."""

    def swapped(self) -> None:
        """The weights it has run with so far are about to be others."""


class Crew:
    """Of one instance."""

    def __init__(self) -> None:
        self._inside: weakref.WeakSet[Member] = weakref.WeakSet()
        self._outside: weakref.WeakSet[Member] = weakref.WeakSet()
        self._open, self._dissolved, self._given_up = True, False, False
        self._last: Callable[[], None] | None = None
        self._lock, self._closing = threading.Lock(), threading.Lock()

    @property
    def members(self) -> list[Member]:
        """Those who are inside."""
        with self._lock:
            return list(self._inside)

    def enter(self, member: Member) -> bool:
        """Whether it is inside now."""
        with self._lock:
            (self._inside if self._open else self._outside).add(member)
            return self._open

    def leave(self, member: Member) -> None:
        """It is neither inside nor waits."""
        with self._lock:
            self._inside.discard(member)
            self._outside.discard(member)
        self._see_who_is_left()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nobody enters until the end of the block. Waits for another such block to end."""
        with self._closing:
            with self._lock:
                self._open = False
            try:
                yield
            finally:
                with self._lock:
                    self._open = not self._dissolved
                    waiting, self._outside = list(self._outside), weakref.WeakSet()
                for member in waiting:
                    member.resume()
                self._see_who_is_left()

    def wait(self, seconds: float) -> None:
        """Until nobody is inside. Raises StateError if somebody still is after so many seconds, or at `give_up`."""
        until = time.monotonic() + seconds
        while members := self.members:
            if time.monotonic() >= until or self._given_up:
                raise StateError(
                    f"requests on the present weights have not ended in {seconds:g} seconds",
                    value=f"{len(members)} of them",
                    remedy='wait longer, or replace weights with policy="finish", which waits for nobody',
                )
            time.sleep(min(_LOOK, seconds))

    def give_up(self) -> None:
        """Nobody runs those inside any more: whoever waits for their end waits in vain."""
        self._given_up = True

    def dissolve(self, last: Callable[[], None]) -> None:
        """The door stays closed after this block of `closed`, and `last` is called when nobody is inside any more."""
        with self._lock:
            self._dissolved, self._last = True, last

    def _see_who_is_left(self) -> None:
        with self._lock:
            if self._open or self._inside or self._last is None:
                return
            last, self._last = self._last, None
        last()
