"""POST /rollout/generate: latents and how they came to be, as bytes of safetensors."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine.job import Job
from .. import intake
from ..bodies import RolloutBody
from ..models import Asked
from ..refusal import Refusal
from ..service import Service
from ..sse import unless_gone
from ..trajectory import Trajectory, rollout_bytes
from ..weights import ran_with
from .asking import dry, owner_of, require_room, resolve, task_for

FILE = "input_reference"


def router(service: Service) -> APIRouter:
    """The endpoints of whoever trains."""
    routes, jobs = APIRouter(tags=["rollout"]), service.jobs

    @routes.post("/rollout/generate", openapi_extra=intake.described(RolloutBody, FILE))
    async def generate(request: Request) -> Response:
        if service.guard.watching:
            raise Refusal("latents cannot be looked at by this server's safety filter", status=403, code="not_allowed")
        body, upload = await intake.read(request, RolloutBody, file=FILE)
        require_room(service, request, body)
        card = service.models.get(body.model).card
        task, media = task_for(card, body.task, upload)
        parameters = {**body.frames(card, task), "output": body.output}
        asked = await resolve(service, body, task, parameters, media)
        if body.dry_run:
            return JSONResponse(dry(asked))
        with service.admission.admit(owner_of(request), 1):
            made = await unless_gone(request, rollout(asked, body))
        return Response(made, 499 if made is None else 200, media_type="application/octet-stream")

    async def rollout(asked: Asked, body: RolloutBody) -> bytes:
        trajectory = Trajectory() if body.trajectory else None
        observers = [trajectory] if trajectory else []
        make = partial(Job, asked.model.instance, asked.request, observers=observers, follows=body.follow_weights)
        job = await jobs.run(lambda listener: make(listener=listener), priority=body.priority, seconds=body.deadline)
        return await jobs.aside(
            lambda: rollout_bytes(asked.model.result(job), trajectory, {**asked.echo, **ran_with(job)})
        )

    return routes
