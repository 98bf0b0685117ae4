"""Videos are jobs: kept before their client hears of them, run whether it listens or not, taken up after a restart.

    record = await videos.create(asked, body, owner, key=None, fingerprint="")
    ticket = videos.ticket(record)                 # its events, while it runs and a while longer
    await videos.recover()

The same request under the same key makes one job, however often it is sent.
"""

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..api.model import Model
from ..engine import saved
from ..engine.job import Job, Listener
from ..errors import LoopwrightError
from .admission import Admission
from .jobs import Jobs
from .models import Asked, Models
from .records import CANCELLED, COMPLETED, FAILED, IN_PROGRESS, QUEUED, Record, Records, new_id
from .refusal import Refusal, told
from .saver import Saver
from .ticket import Ticket
from .webhooks import Webhooks, promised
from .weights import ran_with

VIDEO, STILL = ".mp4", ".png"
_REMEMBERED = 256  # ended jobs whose events can still be watched
_log = logging.getLogger("loopwright.serving")


class Videos:
    """On the event loop; whatever blocks is done in threads."""

    def __init__(
        self, jobs: Jobs, models: Models, records: Records, saver: Saver, admission: Admission, *, webhooks: Webhooks
    ) -> None:
        self._jobs, self._models, self._records = jobs, models, records
        self._saver, self._admission, self._webhooks = saver, admission, webhooks
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()

    async def create(
        self,
        asked: Asked,
        *,
        owner: str,
        priority: str = "normal",
        seconds: float | None = None,
        key: str | None = None,
        fingerprint: str = "",
        webhook: str | None = None,
    ) -> Record:
        """Keep and queue a job. Raises Refusal where there is no room, or where the key made another request."""
        if key is not None and (known := await self._known(owner, key, fingerprint)):
            return known
        now = time.time()
        record = Record(
            id=new_id("video"),
            owner=owner,
            model=asked.model.card.name,
            status=QUEUED,
            created=now,
            echo=asked.echo if webhook is None else {**asked.echo, **promised(webhook)},
            priority=priority,
            deadline=None if seconds is None else now + seconds,
            suffix=STILL if asked.request.num_frames == 1 else VIDEO,
            key=key,
            fingerprint=fingerprint,
        )
        self._admission.enter(owner, 1)
        kept = asyncio.ensure_future(self._accept(asked, record))
        try:
            return await asyncio.shield(kept)  # whether its client is there or not, from here on it is a job or nothing
        except sqlite3.IntegrityError:
            assert key is not None
            return await self._known(owner, key, fingerprint) or record

    async def _accept(self, asked: Asked, record: Record) -> Record:
        path = self._records.saved(record)

        def make(listener: Listener) -> Job:
            job = Job(asked.model.instance, asked.request, listener=listener, observers=[self._saver])
            saved.save(job, path)
            try:
                self._records.add(record)
            except BaseException:
                path.unlink()
                raise
            return job

        try:
            await self._begin(record, make)
        except BaseException as error:
            self._admission.leave(record.owner, 1)
            if not isinstance(error, sqlite3.IntegrityError):
                await asyncio.to_thread(self._records.remove, record)
            raise
        return record

    async def _known(self, owner: str, key: str, fingerprint: str) -> Record | None:
        known = await asyncio.to_thread(self._records.by_key, owner, key)
        if known is not None and known.fingerprint != fingerprint:
            raise Refusal("this Idempotency-Key has made another request", status=409, code="idempotency_conflict")
        return known

    async def recover(self) -> None:
        """Queue what a server before this one has left, in its order, each from where it was last saved.

        What waits for its model stays, and is queued by calling this again.
        """
        for record in await asyncio.to_thread(self._records.unfinished):
            if record.id in self._begun:
                continue
            model = self._models.named.get(record.model)
            if model is None:
                _log.warning("job %s waits for its model %s, which is not served", record.id, record.model)
                continue
            self._admission.enter(record.owner, 1, known=True)
            try:
                await self._begin(record, self._restoring(record, model))
            except LoopwrightError as error:
                self._admission.leave(record.owner, 1)
                await self._close(record, {"status": FAILED, "error": told(error)[1]["error"]})

    def _restoring(self, record: Record, model: Model) -> Callable[[Listener], Job]:
        path, observers = self._records.saved(record), [self._saver]
        return lambda listener: saved.restore(model.instance, path, listener=listener, observers=observers)

    async def _begin(self, record: Record, make: Callable[[Listener], Job]) -> None:
        """Queue the job, which is kept from its first step on, and follow it to its end."""
        seconds = None if record.deadline is None else max(0.0, record.deadline - time.time())
        path = self._records.saved(record)
        self._begun.add(record.id)

        def made(listener: Listener) -> Job:
            job = make(listener)
            self._saver.keep(job, path)
            return job

        try:
            ticket = await self._jobs.start(made, priority=record.priority, seconds=seconds)
        except BaseException:
            self._saver.drop(path)
            self._begun.discard(record.id)
            raise
        self._tickets[record.id] = ticket
        self._following[record.id] = asyncio.create_task(self._follow(record, ticket))

    async def _follow(self, record: Record, ticket: Ticket) -> None:
        try:
            await ticket.started.wait()
            if not ticket.ended.is_set():
                await self._change(record, status=IN_PROGRESS, started=time.time())
            end = await self._end(record, ticket)
            await asyncio.to_thread(self._saver.drop, self._records.saved(record))
            await self._close(record, end)
            await asyncio.to_thread(self._records.saved(record).unlink, missing_ok=True)
            ticket.progress = 100 if end["status"] == COMPLETED else ticket.progress
            ticket.close({"type": str(end["status"])})
        except Exception:
            _log.exception("job %s could not be kept", record.id)
            ticket.close({"type": FAILED})
        finally:
            self._admission.leave(record.owner, 1)
            del self._following[record.id]
            self._begun.discard(record.id)
            self._forget()

    async def _end(self, record: Record, ticket: Ticket) -> Mapping[str, object]:
        """Wait for the end, make the file, and say what is to be kept of it."""
        try:
            job = await self._jobs.finish(ticket)
            path = await self._jobs.encode(self._models.get(record.model), job, self._records.file(record))
            return {"status": COMPLETED, "bytes": path.stat().st_size, "echo": {**record.echo, **ran_with(job)}}
        except Exception as error:
            status, body, _ = told(error)
            if isinstance(error, Refusal) and error.code == "cancelled":
                return {"status": CANCELLED}
            if status == 500:
                _log.exception("job %s failed", record.id, exc_info=error)
            return {"status": FAILED, "error": body["error"]}

    async def _close(self, record: Record, end: Mapping[str, Any]) -> None:
        """Keep how it has ended, and tell who wants to know."""
        ended = {**end, "ended": time.time()}
        await self._change(record, **ended)
        self._webhooks.tell(replace(record, **ended))

    async def _change(self, record: Record, **values: object) -> None:
        await asyncio.to_thread(lambda: self._records.change(record.id, **values))

    def _forget(self) -> None:
        """Events of jobs long ended."""
        for name in list(self._tickets)[:-_REMEMBERED]:
            if name not in self._following:
                del self._tickets[name]

    def ticket(self, record: Record) -> Ticket | None:
        """The job as it runs; None if it ended long ago, or under another server."""
        return self._tickets.get(record.id)

    def eta(self, record: Record) -> float | None:
        """In how many seconds the job may be done, those before it included; None where that cannot be told."""
        if record.id not in self._following:
            return None
        ticket = self._tickets[record.id]
        eta = self._jobs.driver.scheduler.eta(ticket.job)
        return ticket.eta if eta is None else eta

    async def get(self, owner: str, id: str) -> Record:
        """Raises Refusal for an id that is not one of the owner's videos."""
        record = await asyncio.to_thread(self._records.get, owner, id)
        if record is None or record.kind != "video":
            raise Refusal(f"no such video: {id[:80]!r}", status=404, code="not_found", param="video_id")
        return record

    async def page(self, owner: str, *, after: str | None, limit: int, ascending: bool) -> list[Record]:
        """At most `limit` of the owner's videos, by age."""
        return await asyncio.to_thread(self._records.page, owner, after=after, limit=limit, ascending=ascending)

    async def cancel(self, record: Record) -> Record:
        """End the job, unless it has ended, and wait for that."""
        ticket, following = self._tickets.get(record.id), self._following.get(record.id)
        if ticket is not None and following is not None:
            self._jobs.driver.cancel(ticket.job)
            await asyncio.shield(following)
        elif record.status in (QUEUED, IN_PROGRESS):  # its model is not served
            await self._close(record, {"status": CANCELLED})
        return await self.get(record.owner, record.id)

    async def delete(self, record: Record) -> None:
        """Cancel the job and forget it, its file included."""
        await asyncio.to_thread(self._records.remove, await self.cancel(record))
        self._tickets.pop(record.id, None)

    async def leave(self) -> None:
        """Follow no job any more, but those that only have to be written; what is on disk is for the next server."""
        following = dict(self._following)
        for name, task in following.items():
            if not self._tickets[name].ended.is_set():
                task.cancel()
        await asyncio.gather(*following.values(), return_exceptions=True)


def answer(record: Record, ticket: Ticket | None, eta: float | None, expires: float) -> dict[str, object]:
    """A video as OpenAI's clients read it, and beside that all that was resolved."""
    parameters = record.echo["parameters"]
    assert isinstance(parameters, Mapping)
    done = record.status == COMPLETED
    return {
        **record.echo,
        "id": record.id,
        "object": "video",
        "status": record.status,
        "progress": 100 if done else ticket.progress if ticket is not None else 0,
        "eta": None if record.ended or eta is None else round(eta, 3),
        "created_at": int(record.created),
        "started_at": None if record.started is None else int(record.started),
        "completed_at": int(record.ended) if done and record.ended else None,
        "expires_at": int(record.ended + expires) if done and record.ended else None,
        "seconds": f"{parameters['num_frames'] / parameters['fps']:g}",
        "error": record.error,
        "priority": record.priority,
        "remixed_from_video_id": None,
    }
