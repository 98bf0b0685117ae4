"""How far a generation is, on stderr: a live bar on a terminal, a line a stage elsewhere, nothing when quiet.

    with progress(quiet=False, requests=2) as show:
        for result in model.run_all(requests, listener=show.event): ...

Deliberately absent: stdout, which belongs to the results.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..engine.events import Cancelled, Done, Event, Failed, Started, Stepped

ENDS = (Done, Failed, Cancelled)


class Display(Protocol):
    """What `generate` tells its progress."""

    def loading(self, part: str, index: int, total: int) -> None:
        """Component `index` of `total`, counted from 1, is about to be read."""

    def event(self, event: Event) -> None:
        """Something happened to the job; a listener."""


@contextmanager
def progress(*, quiet: bool | None, requests: int = 1) -> Iterator[Display]:
    """The display that fits where stderr goes, for so many requests; several are numbered."""
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield _Bars(bars, requests)
    else:
        yield _Lines(requests)


class _Silent:
    def loading(self, part: str, index: int, total: int) -> None: ...

    def event(self, event: Event) -> None: ...


class _Titles:
    """The numbers of jobs among their like, in the order they were accepted in."""

    def __init__(self, requests: int) -> None:
        self._total, self._numbers = requests, dict[str, int]()

    def of(self, job: str) -> str:
        number = self._numbers.setdefault(job, len(self._numbers) + 1)
        return f"[{number}/{self._total}] " if self._total > 1 else ""


@dataclass(slots=True)
class _Stage:
    """Where a job is: its stage, the steps of it that are done, and when it began."""

    name: str
    steps: int = 0
    begun: float = field(default_factory=time.perf_counter)


class _Lines:
    """One line a stage, when it is over."""

    def __init__(self, requests: int) -> None:
        self._titles, self._stages = _Titles(requests), dict[str, _Stage]()

    def loading(self, part: str, index: int, total: int) -> None:
        print(f"loading {part} ({index} of {total})", file=sys.stderr, flush=True)

    def event(self, event: Event) -> None:
        title = self._titles.of(event.job)
        if isinstance(event, Stepped):
            self._stages[event.job].steps = event.index
        elif isinstance(event, (Started, *ENDS)):
            self._tell(title, self._stages.pop(event.job, None))
            if isinstance(event, Started):
                self._stages[event.job] = _Stage(event.stage)

    def _tell(self, title: str, stage: _Stage | None) -> None:
        if stage is not None:
            seconds = time.perf_counter() - stage.begun
            counted = f"{stage.steps} step{'s' * (stage.steps != 1)} in {seconds:.1f} s"
            rate = ", ".join(filter(None, [counted, _rate(stage.steps, seconds)]))
            print(f"{title}{stage.name}: {rate}", file=sys.stderr, flush=True)


class _Bars:
    """A bar a request under way: stage, step i of n, steps a second, time since it began, time left.

    Time left is in all, as far as the scheduler can tell. Of several requests those that have ended leave.
    """

    def __init__(self, bars: Progress, requests: int) -> None:
        self._bars, self._titles, self._requests = bars, _Titles(requests), requests
        self._tasks: dict[str, TaskID] = {}
        self._stages: dict[str, _Stage] = {}

    def loading(self, part: str, index: int, total: int) -> None:
        self._show("", f"loading {part}", index, total)

    def event(self, event: Event) -> None:
        title = self._titles.of(event.job)
        if isinstance(event, Started):
            self._stages[event.job] = _Stage(event.stage)
            self._show(event.job, title + event.stage, 0, None)
        elif isinstance(event, Stepped):
            seconds = time.perf_counter() - self._stages[event.job].begun
            left = seconds / event.index * (event.total - event.index) if event.eta is None else event.eta
            rate = _rate(event.index, seconds)
            self._show(event.job, title + event.stage, event.index, event.total, rate=rate, left=f"ETA {_clock(left)}")
        elif isinstance(event, ENDS):
            self._end(event.job)

    def _end(self, job: str) -> None:
        if self._requests > 1 and job in self._tasks:
            self._bars.remove_task(self._tasks.pop(job))
        elif self._requests == 1:
            self._show(job, "done", 1, 1)

    def _show(self, job: str, what: str, index: int, total: int | None, *, rate: str = "", left: str = "") -> None:
        if job not in self._tasks:
            self._tasks[job] = self._bars.add_task("", total=None, steps="", rate="", left="")
        steps = "" if total is None else f"{index}/{total}"
        self._bars.update(
            self._tasks[job], description=what, completed=index, total=total, steps=steps, rate=rate, left=left
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
