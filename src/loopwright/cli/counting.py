"""How many of so many are done, on stderr: a bar with the time left on a terminal, a line now and then elsewhere.

with counting("checking", quiet=False) as tell:
    tell(3, 100)                                  # checking 3/100, 0.25 a second, 388 s left
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 10.0  # seconds between two lines where there is no terminal


class Lines:
    """Says how far it is whenever `EVERY` seconds have passed; nothing of what takes less."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._begun: tuple[float, int] | None = None
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._last = (now, done), now
        if now - self._last < EVERY:
            return
        self._last = now
        rate = (done - self._begun[1]) / (now - self._begun[0])
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        self._say(f"{self._what} {done}/{total}, {rate:.3g} a second{left}")


@contextmanager
def counting(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A function that takes how many are done, and of how many."""
    if quiet:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        yield Lines(what, say)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def say(line: str) -> None:
    """A line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)
