"""How a training run goes, on stderr: a bar with the time left on a terminal, a line now and then elsewhere.

    with display(quiet=False) as shown:
        train(run, shown)

Of several processes only the first is told, so only it shows anything.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..distributed.group import leads
from ..training.session import Display
from .counting import EVERY, Lines, say

_SHOWN = {"loss": ".4f", "held_out/loss": ".4f", "reward_mean": ".4f", "held_out/reward": ".4f",
          "held_out/judge": ".4f", "grad_norm": ".3g", "lr": ".2e", "samples_per_second": ".3g"}  # fmt: skip


@contextmanager
def display(*, quiet: bool) -> Iterator[Display]:
    """The display that fits where stderr goes."""
    if quiet or not leads() or not sys.stderr.isatty():
        yield _Lines(quiet=quiet or not leads())
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bars:
        yield _Bars(bars)


def summed(metrics: Mapping[str, float]) -> str:
    """The metrics people look at, in a few words."""
    return "  ".join(f"{name} {metrics[name]:{form}}" for name, form in _SHOWN.items() if name in metrics)


class _Lines:
    """Now and then, and at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._begun, self._first = quiet, time.monotonic(), 0
        self._last = -EVERY
        self._encoding = Lines("encoding", say)

    def say(self, line: str) -> None:
        say(line)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._quiet or (now - self._last < EVERY and step < steps):
            return
        if not self._first:
            self._first, self._begun = step, now
        done = step - self._first
        left = f", {(now - self._begun) / done * (steps - step):.0f} s left" if done and step < steps else ""
        self._last = now
        self.say(f"step {step}/{steps}  {summed(metrics)}{left}")

    def encoding(self, done: int, total: int) -> None:
        if not self._quiet:
            self._encoding(done, total)


class _Bars:
    """A bar for the encodings, then one for the steps."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._show("training", step, steps, summed(metrics))

    def encoding(self, done: int, total: int) -> None:
        self._show("encoding", done, total, "encoding")

    def _show(self, name: str, done: int, total: int, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, completed=done)
        self._bars.update(self._tasks[name], description=text, completed=done, total=total)
