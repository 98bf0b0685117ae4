"""Decides whose step is next, and with whom it shares a call.

    runner = Interleaved()
    jobs = [runner.submit(Job(model, request)) for request in requests]
    runner.run()

`Serial` finishes one job before the next; `Interleaved` gives each a step in turn; `Batched` joins those whose steps
have equal keys, as each request's mode allows. The first two give the same bits, and so does the third for requests in
`exact` and `fixed` mode: invariants, each with a test. Jobs may be of different models, and come and go at any step.
"""

import threading
from collections import deque

from .job import Job, Pending
from .merge import MERGED, Merger


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


class Batched(Interleaved):
    """The next job's step, and in the same call those of others with an equal key, up to `rows` in `throughput` mode.

    Requests in `exact` mode never share; those in `fixed` mode share with others of the same number of rows.
    """

    def __init__(self, rows: int = 32) -> None:
        super().__init__()
        self.merger = Merger()
        self._limit = rows

    def step(self) -> bool:
        """Run one call; False if no job can run."""
        with self._lock:
            lead = self._take()
        if lead is None:
            return False
        group = self._group(lead)
        if group and self._shares(lead, group[0][1]):
            self.merger.run([job for job, _ in group], [pending for _, pending in group])
        elif group:
            lead.run(group[0][1])
        with self._lock:
            for job in [job for job, _ in group] or [lead]:
                self._finish(job)
        return True

    def _group(self, lead: Job) -> list[tuple[Job, Pending]]:
        pending = lead.pending()
        if pending is None:
            return []
        group = [(lead, pending)]
        if self._shares(lead, pending):
            limit = lead.request.rows if lead.request.mode == "fixed" else self._limit
            with self._lock:
                others = [job for job in self._jobs if _alike(job, lead)]
            for job in others:
                if len(group) == limit:
                    break
                theirs = job.pending()
                if theirs is not None and theirs.key == pending.key:
                    group.append((job, theirs))
        return group

    def _shares(self, job: Job, pending: Pending) -> bool:
        return job.request.mode != "exact" and pending.step.unit in MERGED

    def _finish(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        if job.ended:
            self.merger.forget(job)
        else:
            self._put_back(job)


def _alike(job: Job, lead: Job) -> bool:
    """Whether they may share a call at all; the key of their steps decides."""
    mine, other = job.request, lead.request
    return job.runnable and job.model is lead.model and (mine.mode, mine.rows) == (other.mode, other.rows)
