"""Keeps jobs on disk while they run: at the end of every stage, and every few seconds in between.

    saver = Saver(seconds=3.0)
    driver = Driver(scheduler, between=saver)
    saver.keep(job, path)                          # until saver.drop(job)

Called between steps by the engine's thread, so that a file always holds a job as it stands between two.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..engine import saved
from ..engine.job import Job


@dataclass(slots=True)
class _Kept:
    """A job, and the stage and step it was last saved at, and when."""

    job: Job
    path: Path
    stage: int
    index: int
    at: float


class Saver:
    """`keep` and `drop` from any thread. A job that cannot be saved fails: nobody may rely on what is not kept."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._kept: dict[str, _Kept] = {}

    def keep(self, job: Job, path: Path) -> None:
        """From now on, until it is dropped or has ended. The file exists already."""
        self._kept[job.id] = _Kept(job, path, job.stage, job.index, self._clock())

    def drop(self, job: Job) -> None:
        """No more of it is saved; its file stays."""
        self._kept.pop(job.id, None)

    def __call__(self) -> None:
        """Save those that have moved on and are due."""
        if not self._kept:
            return
        now = self._clock()
        for kept in list(self._kept.values()):
            moved = kept.job.stage != kept.stage
            if moved or (now - kept.at >= self._seconds and kept.job.index != kept.index):
                self._save(kept)

    def save_all(self) -> None:
        """Save all as they are now."""
        for kept in list(self._kept.values()):
            self._save(kept)

    def _save(self, kept: _Kept) -> None:
        job = kept.job
        if job.settle is not None:
            job.settle()  # what is not finite must fail, not be kept
        if job.ended:
            return
        try:
            saved.save(job, kept.path)
        except OSError as error:
            job.fail(error)
        kept.stage, kept.index, kept.at = job.stage, job.index, self._clock()
