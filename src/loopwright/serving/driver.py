"""The thread of a device: it drives the scheduler, and is the only one that runs steps.

    driver = Driver(scheduler, between=saver)
    driver.submit(job, priority="high")           # from any thread, as all below
    driver.call(lambda: model.rows(request)).result()
    driver.close(saver.save_all)

Without work it sleeps until somebody brings some.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from ..engine.job import Job
from ..engine.scheduler import Scheduler
from .refusal import Refusal

T = TypeVar("T")


class Driver:
    """`between` is called between steps. `error` is what ended the thread, if that was not `close`."""

    def __init__(self, scheduler: Scheduler, *, between: Callable[[], None]) -> None:
        self.scheduler, self._between = scheduler, between
        self.error: BaseException | None = None
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake, self._closing = threading.Event(), False
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, priority: str = "normal", deadline: float | None = None) -> Job:
        """Queue a job; `deadline` in seconds of the scheduler's clock. Raises as `Scheduler.submit`, or `require`."""
        with self._changing:
            self.require()
            self._jobs.add(job)
        self.scheduler.submit(job, priority=priority, deadline=deadline)
        self._wake.set()
        return job

    def cancel(self, job: Job) -> None:
        """End the job at the next step boundary."""
        job.cancel()
        self._wake.set()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` between two steps, with the device to itself."""
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        with self._changing:
            self.require()
            self._calls.append(do)
        self._wake.set()
        return future

    def require(self) -> None:
        """Raise Refusal unless steps are run."""
        if self.error is not None:
            raise _ended(self.error)
        if self._closing:
            raise Refusal("the server is being stopped", status=503, code="stopping", retry_after=10)

    def close(self, last: Callable[[], None]) -> None:
        """Stop at the next step boundary, call `last` on the engine's thread, and wait for its end."""
        if self.error is None and self._thread.is_alive():
            self._last = last
            with self._changing:
                self._closing = True
            self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._closing:
                    self._turn()
                self._last()
        except BaseException as error:  # a bug: nobody may wait for what will never come
            with self._changing:
                self.error = error
            for job in list(self._jobs):
                if not job.ended:
                    job.fail(_ended(error))
        self.scheduler.prices.save()

    def _turn(self) -> None:
        self._wake.clear()
        while self._calls:
            self._calls.popleft()()
        worked = self.scheduler.step()
        self._between()
        if not worked and not self._calls:
            self.scheduler.prices.save()
            self._wake.wait()


def _ended(error: BaseException) -> Refusal:
    return Refusal(f"the engine has ended ({type(error).__name__}: {error})", status=503, code="engine_ended")
