"""What clients reach of a fleet: each request is passed on to a replica, and its answer back, as they come.

    app = create_front(members, settings, keys)

A generation goes where `Router` says; what is about a video or an image, to the replica that has it; lists are put
together; changes of models and weights go to all. If a replica ends before it has answered, the request is sent to
another: a video's under a key, so that it becomes one job however often it is sent.
"""

import asyncio
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..gate import Gate
from ..keys import Keys
from ..metrics import Metrics
from ..refusal import Refusal, shape, told
from ..settings import Settings
from ..sse import left, unless_gone
from ..tasks import unless
from .exposition import labelled
from .members import READY, Member, Members
from .replica import BODIES
from .router import Router

MAKING = (*BODIES, "/v1/images/edits")
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection", "date"}
_OURS = {"content-length", "x-forwarded-proto", "x-forwarded-for", "forwarded"}
_KEY = "idempotency-key"
_REMEMBERED = 10_000  # whereabouts of videos, and of keys
_PATIENCE = 30.0  # seconds until a replica that does not answer any more is known to have ended
_ATTEMPTS = 4
Headers = list[tuple[bytes, bytes]]
Place = tuple[str, str]  # an owner and a key, or nobody and the id of a video or image


class Front:
    """Passes requests on. `http` is closed by whoever made it; `metrics` are the front's own."""

    def __init__(self, members: Members, http: httpx.AsyncClient, metrics: Metrics) -> None:
        self._members, self._http, self._router, self._metrics = members, http, Router(), metrics
        self._places: OrderedDict[Place, Member] = OrderedDict()

    async def handle(self, request: Request) -> Response:
        """The answer of whichever replica it is for."""
        path, method = request.url.path, request.method
        body = await request.body()
        if method == "POST" and path in MAKING:
            return await self._make(request, body)
        if path.startswith(("/v1/videos/", "/v1/images/")):
            return await self._about(request, body, path.split("/")[3])
        if path == "/v1/videos" and method == "GET":
            return await self._listed(request)
        if method in ("POST", "DELETE"):
            return await self._everywhere(request, body)
        return await self._pass(self._some(), request, body)

    async def health(self, request: Request) -> Response:
        """Of every replica; the fleet is well while one is."""

        async def one(member: Member) -> dict[str, object]:
            try:
                answer = await self._http.get(f"{member.url}/health")
                return {"replica": member.name, "status": "ok" if answer.is_success else "unhealthy"}
            except httpx.TransportError as error:
                return {"replica": member.name, "status": str(error) or type(error).__name__}

        found = await asyncio.gather(*(one(member) for member in self._members.ready))
        others = [{"replica": m.name, "status": m.state} for m in self._members.all.values() if m.state != READY]
        well = any(one["status"] == "ok" for one in found)
        body = {"status": "ok" if well else "unhealthy", "replicas": [*found, *others]}
        return JSONResponse(body, 200 if well else 503)

    async def metrics(self, request: Request) -> Response:
        """Those of all replicas, each with its name, and those of what is answered here."""
        ready = self._members.ready
        answers = await asyncio.gather(*(self._read(member, "/metrics", request) for member in ready))
        texts = {member.name: answer.text for member, answer in zip(ready, answers, strict=True)}
        return Response(labelled({"front": self._metrics.text().decode(), **texts}), media_type="text/plain")

    # --- who is it for

    async def _make(self, request: Request, body: bytes) -> Response:
        """A generation, at the replica that will be done first."""
        headers = _headers(request)
        place = await self._place(request, headers)
        for _ in range(_ATTEMPTS):
            member = self._known(place) or await self._chosen(request, body)
            self._remember(place, member)
            answer = await self._tried(member, request, body, headers)
            if answer is not None:
                return answer
        raise _nobody()

    async def _place(self, request: Request, headers: Headers) -> Place | None:
        """What the request is remembered by, if it has a key: the client's, or one that a video gets here."""
        theirs = request.headers.get(_KEY)
        if theirs is None and request.url.path != "/v1/videos":
            return None
        if theirs is None:
            headers.append((_KEY.encode(), f"front-{uuid.uuid4().hex}".encode()))
        place = str(request.state.owner), theirs or headers[-1][1].decode()
        if theirs is not None and self._known(place) is None:
            member = await self._asked("made", *place)
            if member is not None:
                self._remember(place, member)
        return place

    async def _chosen(self, request: Request, body: bytes) -> Member:
        """Where the router says."""
        path, text = request.url.path, body.decode("utf-8", "replace") if _is_json(request) else ""
        offers = await self._members.offers(path, text)
        if not offers:
            raise _nobody()
        return self._members.all[self._router.choose(offers, _prompt(text), time.monotonic())]

    async def _about(self, request: Request, body: bytes, id: str) -> Response:
        """What is about a video or an image, where that is; anywhere for what is nowhere."""
        for _ in range(_ATTEMPTS):
            member = self._known(("", id)) or await self._asked("has", id)
            if member is not None:
                self._remember(("", id), member)
            answer = await self._tried(member or self._some(), request, body, _headers(request))
            if answer is not None:
                return answer
        raise _nobody()

    async def _listed(self, request: Request) -> Response:
        """A page of all replicas' videos; what is wrong with the question, one of them says."""
        first = await self._read(self._some(), f"/v1/videos?{request.url.query}", request)
        if not first.is_success and first.status_code != 404:
            return Response(first.content, first.status_code, media_type="application/json")
        asked = request.query_params
        descending, limit, after = asked.get("order") != "asc", int(asked.get("limit", 20)), asked.get("after")
        pages = await asyncio.gather(*(self._pages(member, request) for member in self._members.ready))
        videos = sorted((video for page in pages for video in page), key=_age, reverse=descending)
        names = [str(video["id"]) for video in videos]
        if after is not None and after not in names:
            return Response(first.content, first.status_code, media_type="application/json")
        begin = 0 if after is None else names.index(after) + 1
        data = videos[begin : begin + limit]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": data, "has_more": begin + limit < len(videos), **ends})

    async def _pages(self, member: Member, request: Request) -> list[dict[str, object]]:
        """All videos of this client's on a replica."""
        found: list[dict[str, object]] = []
        more = True
        while more:
            after = f"&after={found[-1]['id']}" if found else ""
            page = (await self._read(member, f"/v1/videos?limit=100{after}", request)).json()
            found += page.get("data", [])
            more = bool(page.get("has_more")) and bool(page["data"])
        return found

    async def _everywhere(self, request: Request, body: bytes) -> Response:
        """What changes a server changes all of them: the first refusal is the answer, else the last answer."""
        answer: httpx.Response | None = None
        for member in self._members.ready:
            answer = await self._http.send(self._outgoing(member, request, body, _headers(request)))
            if not answer.is_success:
                break
        if answer is None:
            raise _nobody()
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    # --- whereabouts

    def _some(self) -> Member:
        ready = self._members.ready
        if not ready:
            raise _nobody()
        return ready[0]

    def _known(self, place: Place | None) -> Member | None:
        """Who has it, by what is remembered here and by who has inherited from whom."""
        member = None if place is None else self._places.get(place)
        while member is not None and member.heir is not None:
            member = member.heir
        return member

    def _remember(self, place: Place | None, member: Member) -> None:
        if place is None:
            return
        self._places[place] = member
        self._places.move_to_end(place)
        while len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)

    async def _asked(self, what: str, *given: str) -> Member | None:
        """The replica that says it has it."""
        ready = [member for member in self._members.ready if member.hired is not None]
        answers = await asyncio.gather(*(getattr(m.hired, what)(*given) for m in ready), return_exceptions=True)
        return next((m for m, answer in zip(ready, answers, strict=True) if answer is True), None)

    # --- passing on

    async def _tried(self, member: Member, request: Request, body: bytes, headers: Headers) -> Response | None:
        """The answer; None if the replica has ended, or is about to, and what it had is by now at another."""
        try:
            answer = await self._pass(member, request, body, headers)
        except httpx.TransportError:
            await _gone(member)
            return None
        if answer.status_code == 503 and isinstance(answer, Passed) and await answer.is_stopping():
            await _gone(member)
            return None
        return answer

    async def _pass(self, member: Member, request: Request, body: bytes, headers: Headers | None = None) -> Response:
        outgoing = self._outgoing(member, request, body, _headers(request) if headers is None else headers)
        answer = await unless_gone(request, self._http.send(outgoing, stream=True))
        return Response(status_code=499) if answer is None else Passed(answer)

    def _outgoing(self, member: Member, request: Request, body: bytes, headers: Headers) -> httpx.Request:
        target = request.scope["raw_path"] + (b"?" + request.scope["query_string"] if request.url.query else b"")
        url = httpx.URL(member.url).copy_with(raw_path=target)
        return self._http.build_request(request.method, url, headers=headers, content=body or None)

    async def _read(self, member: Member, target: str, request: Request) -> httpx.Response:
        given = {n: v for n in ("authorization", "host") if (v := request.headers.get(n)) is not None}
        return await self._http.get(f"{member.url}{target}", headers=given)


class Passed(Response):
    """A replica's answer, sent on as it comes; who leaves ends it there too."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer, self._body, self.status_code, self.background = answer, b"", answer.status_code, None
        self.raw_headers = [(n.lower(), v) for n, v in answer.headers.raw if n.lower().decode() not in _HOP]

    async def is_stopping(self) -> bool:
        """Whether the replica says no because it ends. Reads the answer, which is short."""
        self._body = await self._answer.aread()
        return json.loads(self._body).get("error", {}).get("code") in ("stopping", "engine_ended")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless(left(receive), self._send(send))
        finally:
            await self._answer.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._body:
            await send({"type": "http.response.body", "body": self._body, "more_body": True})
        else:
            async for part in self._answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def create_front(members: Members, settings: Settings, keys: Keys | None, closing: asyncio.Event) -> Starlette:
    """The ASGI application: who asks is checked here as by a server alone."""
    http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None))
    metrics = Metrics({})
    front = Front(members, http, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with http:
            yield

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    methods = ["GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"]
    routes = [
        Route("/livez", live),
        Route("/health", front.health),
        Route("/metrics", front.metrics),
        Route("/{path:path}", front.handle, methods=methods),
    ]
    handlers = {Refusal: _refused, HTTPException: _unknown}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]
    app.add_middleware(Gate, settings=settings, keys=keys, metrics=metrics, closing=closing.is_set)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    status, body, headers = told(error)
    return JSONResponse(body, status, dict(headers))


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(shape(str(error.detail), error.status_code, "invalid_request"), error.status_code)


async def _gone(member: Member) -> None:
    """Wait until what the replica had is elsewhere; for a while, if it has not ended after all."""
    try:
        async with asyncio.timeout(_PATIENCE if member.state != READY else 2.0):
            await member.left.wait()
    except TimeoutError:
        return


def _headers(request: Request) -> Headers:
    """As the client sent them, but for what belongs to a connection; and how it reached this server."""
    kept = [(n, v) for n, v in request.headers.raw if n.decode("latin-1") not in _HOP | _OURS]
    return [*kept, (b"x-forwarded-proto", request.url.scheme.encode())]


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").split(";")[0].strip().lower() == "application/json"


def _prompt(text: str) -> str | None:
    """What is encoded, and may be in a cache."""
    try:
        body = json.loads(text) if text else None
    except ValueError:
        return None
    return body["prompt"] if isinstance(body, dict) and isinstance(body.get("prompt"), str) else None


def _age(video: Mapping[str, object]) -> tuple[int, str]:
    return int(str(video["created_at"])), str(video["id"])


def _nobody() -> Refusal:
    return Refusal("no replica is ready", status=503, code="no_replica", retry_after=5)
