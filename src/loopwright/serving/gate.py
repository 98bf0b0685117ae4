"""What every request passes first: an id, who asks, whether it may, how much it may send; and the line in the log.

app.add_middleware(Gate, settings=settings, keys=keys, metrics=metrics, closing=lambda: False)

Pages of other sites cannot use a server without keys through a browser: a foreign `Origin` is refused, and on a
loopback address a foreign `Host`.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .keys import Keys
from .logs import FIELDS, about
from .metrics import Metrics
from .refusal import Refusal, told
from .settings import Limits, Settings
from .tracing import current_trace

ANYBODY, GONE = "anybody", 499  # the status of a request that got no answer, because its client had left
_OPEN = ("/health", "/livez", "/")
_PAGE = "/page/"  # what / is made of
_HERE = ("localhost", "127.0.0.1", "::1")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("loopwright.serving")


class Gate:
    """ASGI middleware. `closing` says whether the server takes no new work any more."""

    def __init__(
        self, app: ASGIApp, *, settings: Settings, keys: Keys | None, metrics: Metrics, closing: Callable[[], bool]
    ) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._metrics, self._closing = metrics, closing
        self._reading = _Reading()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = _request_id(headers)
        with about(name):
            await self._handle(scope, receive, send, headers=headers, name=name)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, *, headers: Headers, name: str) -> None:
        begun, status = time.perf_counter(), GONE
        scope.setdefault("state", {})["trace"] = current_trace()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = name
            await send(message)

        try:
            try:
                self._admit(scope, headers)
            except Refusal as refusal:
                code, answer, more = told(refusal)
                await JSONResponse(answer, code, more)(scope, receive, sending)
            else:
                body = _Body(receive, self._settings.limits, self._reading)
                try:
                    await self._app(scope, body.receive, sending)
                finally:
                    self._reading.bytes -= body.bytes
        except ClientDisconnect:
            status = GONE  # in the middle of its body
        except Exception as error:
            _log.exception("request %s failed", name)
            if status == GONE:  # nothing was answered yet
                code, answer, more = told(error)
                await JSONResponse(answer, code, more)(scope, receive, sending)
        finally:
            self._note(scope, status, time.perf_counter() - begun)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Raise Refusal for who may not ask."""
        self._check_site(headers)
        scope["state"]["owner"] = self._owner(scope, headers)
        if self._closing() and scope["method"] not in ("GET", "HEAD"):
            raise Refusal("the server is being stopped", status=503, code="stopping", retry_after=10)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._settings.limits.body:
            raise _too_large(self._settings.limits)

    def _check_site(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._keys is not None:  # which no page of another site has
            return
        if self._settings.local and _hostname(f"//{host}") not in (*_HERE, self._settings.host):
            raise Refusal(f"no such host here: {host[:80]!r}", status=403, code="foreign_host")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(f"pages of {origin[:80]!r} may not use this server", status=403, code="foreign_origin")

    def _owner(self, scope: Scope, headers: Headers) -> str:
        if self._keys is None or scope["path"] in _OPEN or scope["path"].startswith(_PAGE):
            return ANYBODY
        kind, _, key = headers.get("authorization", "").partition(" ")
        owner = self._keys.owner(key.strip()) if kind.lower() == "bearer" else None
        if owner is None:
            raise Refusal("give a valid API key: Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return owner

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route, method, path = getattr(scope.get("route"), "path", "none"), _method(scope), scope["path"][:200]
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        line = {
            "method": method,
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
            "owner": scope["state"].get("owner"),
        }
        if (trace := scope["state"]["trace"]) is not None:
            line["trace_id"] = trace
        _log.info("%s %r %s in %.3f s", method, path, status, seconds, extra={FIELDS: line})


@dataclass(slots=True)
class _Reading:
    """Bytes of all the bodies whose requests are under way."""

    bytes: int = 0


class _Body:
    """A body of at most so many bytes, in at most so many seconds, and of which all together hold only so many."""

    def __init__(self, receive: Receive, limits: Limits, all: _Reading) -> None:
        self._receive, self._limits, self._all = receive, limits, all
        self.bytes, self._whole = 0, False
        self._until = time.monotonic() + limits.upload_seconds

    async def receive(self) -> Message:
        """Raises Refusal where it is too large or too slow."""
        if self._whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise Refusal("the body came too slowly", status=408, code="too_slow") from None
        self._count(len(message.get("body", b"")))
        self._whole = not message.get("more_body", False)
        return message

    def _count(self, size: int) -> None:
        self.bytes += size
        self._all.bytes += size
        if self.bytes > self._limits.body:
            raise _too_large(self._limits)
        if self._all.bytes > self._limits.bodies:
            raise Refusal("too much is being sent at once", status=429, code="too_many_bytes", retry_after=5)


def _too_large(limits: Limits) -> Refusal:
    return Refusal(f"the body is too large; at most {limits.body} bytes", status=413, code="body_too_large")


def _method(scope: Scope) -> str:
    """One of a few, whatever a client calls it."""
    return str(scope["method"]) if scope["method"] in ("GET", "POST", "DELETE", "HEAD") else "other"


def _request_id(headers: Headers) -> str:
    """The client's if it is a plain one, else one of ours."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(host).hostname
    except ValueError:
        return None
