"""The plain ways to run several jobs: one call a step, one request a call.

    runner = Interleaved()
    jobs = [runner.submit(Job(model, request)) for request in requests]
    runner.run()

`Serial` finishes one job before the next; `Interleaved` gives each a step in turn. Both give the same bits, and so does
the `Scheduler` that users get: an invariant, with a test. Jobs may be of different models, and come and go at any step.
"""

import threading
from collections import deque

import torch

from .job import Job


class Serial:
    """First come, first served, to the end. A waiting job lets the others pass."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()

    def submit(self, job: Job) -> Job:
        """Queue a job."""
        with self._lock:
            self._jobs.append(job)
        return job

    def step(self) -> bool:
        """Run one step of some job; False if no job can run."""
        with self._lock:
            job = self._take()
        if job is None:
            return False
        job.step()
        if not job.ended:
            with self._lock:
                self._put_back(job)
        return True

    def run(self) -> None:
        """Step until no job can run."""
        with torch.no_grad():
            while self.step():
                pass

    def _take(self) -> Job | None:
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if job.runnable:
                return job
            self._jobs.append(job)
        return None

    def _put_back(self, job: Job) -> None:
        self._jobs.appendleft(job)

    def __len__(self) -> int:
        return len(self._jobs)


class Interleaved(Serial):
    """A step of each job in turn."""

    def _put_back(self, job: Job) -> None:
        self._jobs.append(job)
