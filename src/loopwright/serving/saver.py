"""Keeps jobs on disk while they run: after every step, or every few seconds and at the end of every stage.

    saver = Saver(seconds=0.0)
    driver = Driver(scheduler, between=saver)
    job = Job(model, request, observers=[saver])
    saver.keep(job, path)                          # before it is submitted; until saver.drop(path)

Between two steps the engine's thread takes a copy, and a thread of the saver's writes it while the next step runs. What
a step leads to is not taken before the state ahead of it is on disk: whenever a process ends, a job that is saved after
every step has at most one to do again. States so large that writing them would be most of the work are saved less
often.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ..engine import saved
from ..engine.job import Job
from ..loop import Key, Result, Step

_RATE = 2**28  # bytes a second that may be written of one job
_log = logging.getLogger("loopwright.serving")


@dataclass(slots=True, eq=False)
class _Kept:
    """A job, its file, the stage it was last saved in, when it may be saved again, and what is being written."""

    job: Job
    path: Path
    stage: int
    due: float
    writing: Future[None] | None = None


class Saver:
    """`keep` and `drop` from any thread, all else by the engine's. A job that cannot be saved fails: nobody may rely on
    what is not kept.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._kept: dict[Job, _Kept] = {}
        self._moved: dict[Job, _Kept] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save")

    def keep(self, job: Job, path: Path) -> None:
        """From now on, until it is dropped or has ended. The file exists already."""
        self._kept[job] = _Kept(job, path, job.stage, self._clock() + self._seconds)

    def drop(self, path: Path) -> None:
        """No more is written there; what is there stays. Waits for a write under way."""
        for kept in [kept for kept in list(self._kept.values()) if kept.path == path]:
            del self._kept[kept.job]
            if kept.writing is not None:
                wait([kept.writing])

    def on_step(self, job: Job, step: Step, key: Key, result: Result) -> None:
        """A step of the job has run. Raises OSError if the state before it could not be written."""
        kept = self._kept.get(job)
        if kept is not None:
            self._moved[job] = kept
            if kept.writing is not None:
                kept.writing.result()

    def __call__(self) -> None:
        """Save those that have moved on and are due."""
        if self._moved:
            now = self._clock()
            for kept in list(self._moved.values()):
                if now >= kept.due or kept.job.stage != kept.stage:
                    self._save(kept)

    def save_all(self) -> None:
        """Save all as they are now, and see it written; nothing is saved after this."""
        for kept in list(self._moved.values()):
            self._save(kept)
        self._writer.shutdown()
        for kept in self._kept.values():
            if kept.writing is not None and (error := kept.writing.exception()) is not None:
                _log.error("%s is as it was at an earlier step: %s", kept.path, error)

    def _save(self, kept: _Kept) -> None:
        job = kept.job
        del self._moved[job]
        if job.settle is not None:
            job.settle()  # what is not finite must fail, not be kept
        if job.ended or job not in self._kept:
            return
        if kept.writing is not None:
            wait([kept.writing])
        copy = saved.snapshot(job)
        kept.writing = self._writer.submit(copy.write, kept.path)
        kept.stage, kept.due = job.stage, self._clock() + max(self._seconds, copy.bytes / _RATE)
