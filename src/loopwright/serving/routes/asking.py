"""From a request's body to a request that can be queued.

asked = await resolve(service, body, task, parameters, {"image": contents})
"""

import asyncio
from collections.abc import Mapping

from starlette.requests import Request as HttpRequest

from ...api.model import Parameter
from ...card import Card
from ...program import task_of
from .. import uploads
from ..bodies import Body
from ..models import Asked
from ..service import Service


def owner_of(request: HttpRequest) -> str:
    """Who asks, as the gate has found."""
    return str(request.state.owner)


def require_room(service: Service, request: HttpRequest, body: Body) -> None:
    """Refuse now what would be refused later; not what is only checked, or may be known by its key."""
    if not body.dry_run and "idempotency-key" not in request.headers:
        service.admission.require(owner_of(request), 1)


def task_for(card: Card, task: str | None, upload: bytes | None) -> tuple[str, dict[str, bytes]]:
    """The task, and the uploaded file as what it takes: "image" or "video"."""
    if upload is None:
        return task_of(card, task, ()), {}
    kind, _ = uploads.kind_of(upload)
    return task_of(card, task, (kind,)), {kind: upload}


async def resolve(
    service: Service,
    body: Body,
    task: str,
    parameters: Mapping[str, Parameter],
    media: Mapping[str, bytes],
) -> Asked:
    """Raises Refusal or a LoopwrightError for whatever is wrong with the request."""
    folder, most = service.records.files, service.limits.uploads
    decoded = {
        kind: await asyncio.to_thread(uploads.decode, contents, kind, folder, most=most)
        for kind, contents in media.items()
    }
    return await service.models.resolve(body.model, body.prompt, task, decoded, parameters)


def dry(asked: Asked) -> dict[str, object]:
    """The answer to a request that is only checked."""
    return {"object": "dry_run", **asked.echo}
