"""From a request's body to a request that can be queued.

asked = await resolve(service, body, task, parameters, {"image": contents})
"""

import asyncio
import hashlib
from collections.abc import Mapping

from starlette.requests import Request as HttpRequest

from ...api.model import Parameter
from ...card import Card
from ...program import task_of
from .. import uploads
from ..bodies import Body
from ..models import Asked
from ..refusal import Refusal
from ..service import Service

_KEY = 255  # characters of an Idempotency-Key


def owner_of(request: HttpRequest) -> str:
    """Who asks, as the gate has found."""
    return str(request.state.owner)


def key_of(request: HttpRequest) -> str | None:
    """The Idempotency-Key, if there is one. Raises Refusal for one that is none."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _KEY:
        raise Refusal(f"an Idempotency-Key has 1 to {_KEY} characters", param="Idempotency-Key")
    return key


def fingerprint(body: Body, upload: bytes | None) -> str:
    """Of what was asked for, as far as the client said it."""
    return hashlib.sha256(body.model_dump_json().encode() + b"\0" + (upload or b"")).hexdigest()


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
