"""What a request has taken so far and what it will take yet, by the prices of the stages of requests like it.

forecasts = Forecasts(prices, clock)
forecasts.turn(entry)               # it comes to a stage: the one before is a price now
forecasts.took(entry, seconds)      # a step of it
forecasts.until_done(entry, steps)  # seconds, or None where a stage to come has never been run
"""

from collections.abc import Callable

from .entry import Entry
from .prices import Prices


class Forecasts:
    """Of the requests of one scheduler; `clock` is the scheduler's."""

    def __init__(self, prices: Prices, clock: Callable[[], float]) -> None:
        self._prices, self._clock = prices, clock

    def turn(self, entry: Entry) -> None:
        """The job comes to a stage, the first included: keep what the one before took, look at what is to come."""
        job = entry.job
        if job.stage > entry.stage and entry.steps:
            self._prices.learn_stage(entry.kind, job.stages[entry.stage].stage.name, entry.steps, entry.seconds)
        entry.stage, entry.steps, entry.seconds = job.stage, 0, 0.0
        here, later = self._stages(entry, job.stage), self._stages(entry, job.stage + 1)
        entry.later = None if None in later else sum(filter(None, later))
        entry.left = sum(filter(None, here))
        entry.work = entry.worked + entry.left

    def took(self, entry: Entry, seconds: float) -> None:
        """A step of the job, alone or with others, took so long."""
        if not entry.steps:
            entry.since = self._clock() - seconds
        entry.steps += 1
        entry.seconds += seconds
        entry.worked += seconds
        entry.left = max(0.0, entry.left - seconds)

    def until_done(self, entry: Entry, steps: int) -> float | None:
        """Seconds until the job is done, of whose stage so many steps are left, if others leave it as much of the
        device as they have in this stage so far. None where a later stage has no price.
        """
        if entry.later is None:
            return None
        each = entry.seconds / entry.steps
        if entry.steps == 1:  # the first step of a stage may have loaded its weights
            known = self._prices.stage(entry.kind, entry.job.stages[entry.stage].stage.name)
            each = each if known is None else known[1]
        slowdown = (self._clock() - entry.since) / entry.seconds if entry.seconds else 1.0
        return (steps * each + entry.later) * max(1.0, slowdown)

    def _stages(self, entry: Entry, first: int) -> list[float | None]:
        """Seconds of each stage from `first` on; None for one that no such request has run yet."""
        found = [self._prices.stage(entry.kind, bound.stage.name) for bound in entry.job.stages[first:]]
        return [None if price is None else price[0] * price[1] for price in found]
