"""Server-sent events, and knowing when nobody listens any more.

return EventStream(generator())              # of (name, data, id)
await unless_gone(request, work())           # cancelled when the client leaves
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .refusal import told
from .tasks import beating, unless

T = TypeVar("T")
_BEAT = b": waiting\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Sent(NamedTuple):
    """One event. `id` is what a client repeats as Last-Event-ID."""

    name: str
    data: Mapping[str, object]
    id: str = ""

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        head = f"id: {self.id}\n" if self.id else ""
        return f"{head}event: {self.name}\ndata: {json.dumps(self.data)}\n\n".encode()


class EventStream(Response):
    """Sends events until there are no more or the client leaves; leaving closes the generator, wherever it waits.

    `at_end` is called in any case. A comment every `beat` seconds without an event keeps connections open.
    """

    def __init__(
        self, events: AsyncGenerator[Sent], at_end: Callable[[], None] | None = None, beat: float = 15.0
    ) -> None:
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._at_end, self._beat = events, at_end, beat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless(left(receive), self._send(send))
        finally:
            if self._at_end is not None:
                self._at_end()

    async def _send(self, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._write(write)
        except Exception as error:
            status, answer, _ = told(error)
            await write(Sent("error", answer).encoded())
            if status == 500:
                raise
        await write(b"", more=False)

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        async with aclosing(self._events) as source, aclosing(beating(source, self._beat)) as events:
            async for event in events:
                await write(_BEAT if event is None else event.encoded())


async def unless_gone(request: Request, work: Coroutine[object, object, T]) -> T | None:
    """What `work` gives; it is cancelled, and None given, if the client leaves first. The body must have been read."""
    return await unless(left(request.receive), work)


async def left(receive: Receive) -> None:
    """Return when the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass
