"""GET /v1/models and /v1/models/{id}: what is served, and what it takes. POST and DELETE load and unload it."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...api.model import Model
from .. import intake
from ..bodies import ModelBody
from ..refusal import Refusal
from ..schema import described
from ..service import Service
from .asking import owner_of


def router(service: Service) -> APIRouter:
    """The endpoints of models."""
    routes, lifecycle = APIRouter(tags=["models"]), service.lifecycle

    def shown(model: Model) -> dict[str, object]:
        return described(model, lifecycle.state(model.card.name), service.limits)

    def require_manager(request: Request) -> None:
        if owner_of(request) not in service.settings.managers:
            raise Refusal("this key may not load or unload models here", status=403, code="not_allowed")

    @routes.get("/v1/models")
    async def every() -> Response:
        return JSONResponse({"object": "list", "data": [shown(model) for model in lifecycle.named.values()]})

    @routes.post("/v1/models", openapi_extra=intake.described(ModelBody))
    async def load(request: Request) -> Response:
        require_manager(request)
        body, _ = await intake.read(request, ModelBody)
        model = await asyncio.shield(asyncio.ensure_future(lifecycle.load(body.model)))
        await service.videos.recover()
        return JSONResponse(shown(model))

    @routes.get("/v1/models/{model_id:path}")
    async def one(model_id: str) -> Response:
        return JSONResponse(shown(service.models.get(model_id)))

    @routes.delete("/v1/models/{model_id:path}")
    async def unload(request: Request, model_id: str) -> Response:
        require_manager(request)
        name = service.models.get(model_id).card.name
        await asyncio.shield(asyncio.ensure_future(lifecycle.unload(name)))
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    return routes
