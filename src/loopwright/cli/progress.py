"""How far a generation is, on stderr: a live bar on a terminal, a line a stage elsewhere, nothing when quiet.

    with progress(quiet=False, title="[1/2] ") as show:
        model.run(request, listener=show.event)

Deliberately absent: stdout, which belongs to the results.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..engine.events import Done, Event, Started, Stepped


class Display(Protocol):
    """What `generate` tells its progress."""

    def loading(self, part: str, index: int, total: int) -> None:
        """Component `index` of `total`, counted from 1, is about to be read."""

    def event(self, event: Event) -> None:
        """Something happened to the job; a listener."""


@contextmanager
def progress(*, quiet: bool | None, title: str = "") -> Iterator[Display]:
    """The display that fits where stderr goes. `title` precedes the names of stages."""
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield _Bar(bars, title)
    else:
        yield _Lines(title)


class _Silent:
    def loading(self, part: str, index: int, total: int) -> None: ...

    def event(self, event: Event) -> None: ...


class _Lines:
    """One line a stage, when it is over."""

    def __init__(self, title: str) -> None:
        self._title, self._stage, self._steps, self._begun = title, "", 0, 0.0

    def loading(self, part: str, index: int, total: int) -> None:
        print(f"{self._title}loading {part} ({index} of {total})", file=sys.stderr, flush=True)

    def event(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._steps = event.index
        elif isinstance(event, (Started, Done)):
            self._tell()
            self._stage = event.stage if isinstance(event, Started) else ""
            self._steps, self._begun = 0, time.perf_counter()

    def _tell(self) -> None:
        if self._stage:
            seconds = time.perf_counter() - self._begun
            counted = f"{self._steps} step{'s' * (self._steps != 1)} in {seconds:.1f} s"
            rate = ", ".join(filter(None, [counted, _rate(self._steps, seconds)]))
            print(f"{self._title}{self._stage}: {rate}", file=sys.stderr, flush=True)


class _Bar:
    """Stage, step i of n, steps a second, time since the request began, time left: in all, or else in the stage."""

    def __init__(self, bars: Progress, title: str) -> None:
        self._bars, self._title, self._begun = bars, title, 0.0
        self._task = bars.add_task(title, total=None, steps="", rate="", left="")

    def loading(self, part: str, index: int, total: int) -> None:
        self._show(f"loading {part}", index, total)

    def event(self, event: Event) -> None:
        if isinstance(event, Started):
            self._begun = time.perf_counter()
            self._show(event.stage, 0, None)
        elif isinstance(event, Stepped):
            seconds = time.perf_counter() - self._begun
            stage = seconds / event.index * (event.total - event.index)
            left = stage if event.eta is None else event.eta
            self._show(event.stage, event.index, event.total, _rate(event.index, seconds), f"ETA {_clock(left)}")
        elif isinstance(event, Done):
            self._show("done", 1, 1)

    def _show(self, what: str, index: int, total: int | None, rate: str = "", left: str = "") -> None:
        steps = "" if total is None else f"{index}/{total}"
        self._bars.update(
            self._task, description=self._title + what, completed=index, total=total, steps=steps, rate=rate, left=left
        )


def _bars() -> Progress:
    texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("steps", "rate", "left")]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *texts[:2], TimeElapsedColumn(), texts[2])
    return Progress(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False)


def _rate(steps: int, seconds: float) -> str:
    return f"{steps / seconds:.2f} steps/s" if steps > 1 and seconds > 0 else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
