"""POST and GET /v1/videos; GET and DELETE /v1/videos/{id}; its content, its events, and POST .../cancel."""

from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import intake
from ..bodies import VideoBody
from ..records import COMPLETED, Record
from ..refusal import Refusal
from ..service import Service
from ..sse import EventStream, Sent
from ..tasks import until
from ..videos import answer
from .asking import dry, fingerprint, key_of, owner_of, require_room, resolve, task_for
from .kept import kept

FILE = "input_reference"


class Page(BaseModel):
    """Which videos are listed."""

    model_config = ConfigDict(extra="forbid")

    after: Annotated[str, Field(max_length=80)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


def router(service: Service) -> APIRouter:
    """The endpoints of videos."""
    routes, videos = APIRouter(tags=["videos"]), service.videos

    def shown(record: Record) -> dict[str, object]:
        return answer(record, videos.ticket(record), videos.eta(record), service.settings.retain_seconds)

    async def asked_for(request: Request, video_id: str) -> Record:
        return await videos.get(owner_of(request), video_id)

    @routes.post("/v1/videos", openapi_extra=intake.described(VideoBody, FILE))
    async def create(request: Request) -> Response:
        body, upload = await intake.read(request, VideoBody, file=FILE)
        if body.webhook is not None:
            service.webhooks.check(body.webhook)
        require_room(service, request, body)
        card = service.models.get(body.model).card
        task, media = task_for(card, body.task, upload)
        asked = await resolve(service, body, task, body.frames(card, task), media)
        if body.dry_run:
            return JSONResponse(dry(asked))
        record = await videos.create(
            asked,
            owner=owner_of(request),
            priority=body.priority,
            seconds=body.deadline,
            key=key_of(request),
            fingerprint=fingerprint(body, upload),
            webhook=body.webhook,
        )
        return JSONResponse(shown(record))

    @routes.get("/v1/videos")
    async def page(request: Request, page: Annotated[Page, Query()]) -> Response:
        if page.after is not None:
            await asked_for(request, page.after)
        found = await videos.page(
            owner_of(request), after=page.after, limit=page.limit + 1, ascending=page.order == "asc"
        )
        data = [shown(record) for record in found[: page.limit]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": data, "has_more": len(found) > page.limit, **ends})

    @routes.get("/v1/videos/{video_id}")
    async def one(request: Request, video_id: str) -> Response:
        return JSONResponse(shown(await asked_for(request, video_id)))

    @routes.get("/v1/videos/{video_id}/content")
    async def content(request: Request, video_id: str, variant: Literal["video"] = "video") -> Response:
        record = await asked_for(request, video_id)
        if record.status != COMPLETED:
            raise Refusal(f"the video is {record.status}; it has no content", status=409, code="not_completed")
        return await kept(service, record, f"{record.id}{record.suffix}")

    @routes.get("/v1/videos/{video_id}/events")
    async def events(request: Request, video_id: str) -> Response:
        record = await asked_for(request, video_id)
        return EventStream(told_of(record, request.headers.get("last-event-id", "")))

    @routes.post("/v1/videos/{video_id}/cancel")
    async def cancel(request: Request, video_id: str) -> Response:
        return JSONResponse(shown(await videos.cancel(await asked_for(request, video_id))))

    @routes.delete("/v1/videos/{video_id}")
    async def delete(request: Request, video_id: str) -> Response:
        record = await asked_for(request, video_id)
        await videos.delete(record)
        return JSONResponse({"id": record.id, "object": "video.deleted", "deleted": True})

    async def told_of(record: Record, last: str) -> AsyncGenerator[Sent]:
        """What happens to the job, from the event after `last` on. An id is good for the job's run in this server."""
        ticket = videos.ticket(record)
        if ticket is None:
            yield Sent(record.status, {"type": record.status})
            return
        async for number, event in until(service.closing, ticket.watch(ticket.number(last))):
            yield Sent(str(event["type"]), event, ticket.id(number))

    return routes
