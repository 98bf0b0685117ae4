"""Jobs put into the engine from the event loop, and waited for there.

    ticket = await jobs.start(lambda listener: Job(model.instance, request, listener=listener))
    job = await jobs.finish(ticket)                # cancelled with whoever waits

Files are made of results in a pool of threads of its own.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..api.model import Model
from ..api.result import Result
from ..engine.events import Cancelled, Done, Event, Failed, Stepped
from ..engine.job import Job, Listener
from .driver import Driver
from .lifecycle import Lifecycle
from .metrics import Metrics
from .refusal import Refusal, code_of
from .safety import Guard
from .ticket import Ticket
from .tracing import JobSpans

T = TypeVar("T")
_ENCODERS = 2
_LOOK = 0.02  # seconds between two looks at how far the engine is


class Jobs:
    """On the event loop."""

    def __init__(self, driver: Driver, metrics: Metrics, lifecycle: Lifecycle, guard: Guard) -> None:
        self.driver, self._metrics, self._lifecycle, self._guard = driver, metrics, lifecycle, guard
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._live: set[Ticket] = set()
        self._steps = 0  # counted by the engine's thread

    async def stepped(self) -> None:
        """Return once a step of some request has come to a good end; a probe's are not among them."""
        before = self._steps
        while self._steps == before:
            await asyncio.sleep(_LOOK)

    async def start(
        self,
        make: Callable[[Listener], Job],
        *,
        priority: str = "normal",
        seconds: float | None = None,
        probe: bool = False,
    ) -> Ticket:
        """Make a job and queue it; it is cancelled if it has not ended in so many seconds.

        A `probe` only looks whether the engine works: its model may still be idle.
        """
        loop = asyncio.get_running_loop()
        ticket, spans = Ticket(loop), JobSpans(loop)
        due = None if seconds is None else time.perf_counter() + seconds

        def begin() -> None:
            try:
                ticket.job = make(self._until_its_end(spans.also(ticket.listen), ticket, probe))
                spans.of(ticket.job)
                self._submit(ticket.job, priority, due)
            except BaseException as error:
                spans.fail(error)
                raise

        starting = asyncio.ensure_future(asyncio.to_thread(begin))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda task: None if task.exception() else self.driver.cancel(ticket.job))
            raise
        self._live.add(ticket)
        if seconds is not None:
            ticket.alarm = loop.call_later(seconds, self._expire, ticket)
        return ticket

    def _submit(self, job: Job, priority: str, due: float | None) -> None:
        """Queue the job; its model stays until it has ended."""
        self._lifecycle.enter(job.model)
        try:
            self.driver.submit(job, priority=priority, deadline=due)
        except BaseException:
            self._lifecycle.leave(job.model)
            raise

    def _until_its_end(self, listener: Listener, ticket: Ticket, probe: bool) -> Listener:
        def listen(event: Event) -> None:
            if isinstance(event, Stepped) and not probe:
                self._steps += 1
            if isinstance(event, (Done, Failed, Cancelled)):
                self._lifecycle.leave(ticket.job.model, used=not probe)
            listener(event)

        return listen

    async def finish(self, ticket: Ticket) -> Job:
        """The job, done. Raises what ended it otherwise; whoever stops waiting cancels it."""
        try:
            await ticket.ended.wait()
        finally:
            self._live.discard(ticket)
            if ticket.alarm is not None:
                ticket.alarm.cancel()
            if not ticket.job.ended:
                self.driver.cancel(ticket.job)
            self._count(ticket)
        job = ticket.job
        if job.error is not None:
            raise job.error
        if ticket.expired:
            raise Refusal("the deadline has passed", status=422, code="deadline_exceeded", param="deadline")
        if job.status == "cancelled":
            raise Refusal("the request was cancelled", status=409, code="cancelled")
        return job

    async def run(
        self,
        make: Callable[[Listener], Job],
        *,
        priority: str = "normal",
        seconds: float | None = None,
        probe: bool = False,
    ) -> Job:
        """Start and finish."""
        return await self.finish(await self.start(make, priority=priority, seconds=seconds, probe=probe))

    async def encode(self, model: Model, job: Job, path: Path) -> Path:
        """The result as a file, by its suffix."""
        return await self.aside(lambda: self.result(model, job).save(path))

    def result(self, model: Model, job: Job) -> Result:
        """What a job has made, if it may be shown. Blocks. Raises Refusal otherwise."""
        result = model.result(job)
        self._guard.frames(result.video)
        return result

    async def aside(self, work: Callable[[], T]) -> T:
        """What `work` gives, in a thread of the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

    def soonest(self) -> float:
        """In how many seconds the first of those under way may end."""
        left = [ticket.eta for ticket in self._live if ticket.eta is not None]
        waiting = (self.driver.scheduler.eta(ticket.job) for ticket in self._live if ticket.eta is None)
        return min([*left, *(eta for eta in waiting if eta is not None)], default=1.0)

    def close(self) -> None:
        """End the pool, its work done."""
        self._encoders.shutdown()

    def _expire(self, ticket: Ticket) -> None:
        ticket.expired = True
        self.driver.cancel(ticket.job)

    def _count(self, ticket: Ticket) -> None:
        """What became of the job; one that has not ended is cancelled, because nobody waits for it any more."""
        job, metrics = ticket.job, self._metrics
        model, status = job.request.model, job.status if job.ended else "cancelled"
        metrics.jobs.labels(model, status).inc()
        if status == "cancelled":
            reason = "deadline" if ticket.expired else "asked" if job.ended else "client_left"
            metrics.cancels.labels(model, reason).inc()
        if job.error is not None:
            metrics.failures.labels(model, code_of(job.error)).inc()
        for stage, seconds in ticket.stage_seconds.items():
            metrics.stages.labels(model, stage).observe(seconds)
