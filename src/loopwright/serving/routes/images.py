"""POST /v1/images/generations and /v1/images/edits; GET /v1/images/{id}/content."""

import asyncio
import time
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...card import Card
from ...program import task_of
from .. import intake, uploads
from ..bodies import ImageBody
from ..models import Asked
from ..refusal import Refusal
from ..repeats import Keyed
from ..service import Service
from ..sse import EventStream, unless_gone
from .asking import dry, fingerprint, key_of, owner_of, require_room
from .kept import kept

FILE = "image"


def router(service: Service) -> APIRouter:
    """The endpoints of images."""
    routes = APIRouter(tags=["images"])

    @routes.post("/v1/images/generations", openapi_extra=intake.described(ImageBody))
    async def generate(request: Request) -> Response:
        body, _ = await intake.read(request, ImageBody)
        require_room(service, request, body)
        card = service.models.get(body.model).card
        asked = await service.models.resolve(body.model, body.prompt, task_of(card, None, ()), {}, body.parameters())
        return await answer(request, asked, body, "image_generation")

    @routes.post("/v1/images/edits", openapi_extra=intake.described(ImageBody, FILE, required=True))
    async def edit(request: Request) -> Response:
        body, upload = await intake.read(request, ImageBody, file=FILE)
        if upload is None:
            raise Refusal("an edit needs an image, as a file in multipart/form-data", param=FILE)
        require_room(service, request, body)
        task = editing(service.models.get(body.model).card)
        folder, most = service.records.files, service.limits.uploads
        frames = await asyncio.to_thread(uploads.decode, upload, "image", folder, most=most)
        asked = await service.models.resolve(body.model, body.prompt, task, {"video": frames}, body.parameters())
        return await answer(request, asked, body, "image_edit", upload)

    @routes.get("/v1/images/{image_id}/content")
    async def content(request: Request, image_id: str) -> Response:
        record = await asyncio.to_thread(service.records.get, owner_of(request), image_id)
        if record is None or record.kind != "image":
            raise Refusal(f"no such image: {image_id[:80]!r}", status=404, code="not_found", param="image_id")
        return await kept(service, record)

    async def answer(
        request: Request, asked: Asked, body: ImageBody, name: str, upload: bytes | None = None
    ) -> Response:
        key = key_of(request)
        if key is not None and body.stream:
            raise Refusal("a stream is not sent twice: Idempotency-Key is for whole answers", param="Idempotency-Key")
        service.images.seeds(asked, body.n)
        if body.dry_run:
            return JSONResponse(dry(asked))
        owner = owner_of(request)
        if body.stream:
            service.admission.enter(owner, body.n)
            return EventStream(
                service.images.stream(asked, body, name), at_end=lambda: service.admission.leave(owner, body.n)
            )
        make = partial(whole, request, asked, body)
        if key is not None:
            keyed = Keyed(owner, key, fingerprint(body, upload), asked.model.card.name)
            make = partial(service.repeats.once, keyed, make)
        made = await unless_gone(request, make())
        return Response(made, 499 if made is None else 200, media_type="application/json")  # 499: nobody reads it

    async def whole(request: Request, asked: Asked, body: ImageBody) -> bytes:
        begun, owner = int(time.time()), owner_of(request)
        with service.admission.admit(owner, body.n):
            made = await service.images.make(asked, body, owner)
        data = [_absolute(image, request) for image in made]
        answer = {"created": begun, "data": data, "output_format": body.output_format, **asked.echo}
        answer |= {name: made[-1][name] for name in ("weights", "checksums")}
        return bytes(JSONResponse(answer).body)

    return routes


def _absolute(image: dict[str, object], request: Request) -> dict[str, object]:
    """With an address that a client can use as it is."""
    return image if "url" not in image else {**image, "url": f"{str(request.base_url).rstrip('/')}{image['url']}"}


def editing(card: Card) -> str:
    """The task that makes a picture of a picture: video to video, of one frame. Raises Refusal."""
    for name, program in card.programs.items():
        if program.inputs == ("video",):
            return name
    raise Refusal(f"{card.name} edits no images; its tasks: {', '.join(card.programs)}", param="model")
