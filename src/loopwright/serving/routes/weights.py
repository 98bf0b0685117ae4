"""POST /update_weights_from_disk and GET /get_weights_checksum: new weights while requests are served, and which."""

import asyncio
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import intake
from ..bodies import WeightsBody
from ..refusal import Refusal
from ..service import Service
from ..weights import listed, located
from .asking import owner_of


def router(service: Service) -> APIRouter:
    """The endpoints of whoever trains what is served."""
    routes = APIRouter(tags=["weights"])

    @routes.post("/update_weights_from_disk", openapi_extra=intake.described(WeightsBody))
    async def update(request: Request) -> Response:
        if owner_of(request) not in service.settings.managers:
            raise Refusal("this key may not replace weights here", status=403, code="not_allowed")
        body, _ = await intake.read(request, WeightsBody)
        model, begun = service.models.get(body.model), time.monotonic()
        path = await asyncio.to_thread(located, service.settings.model_roots, body.path)
        component, weights = await service.renewal.update(model, body, path)
        took = round(time.monotonic() - begun, 4)
        told = {"model": model.card.name, "component": component, **weights.record(), "seconds": took}
        return JSONResponse(told)

    @routes.get("/get_weights_checksum")
    async def checksums() -> Response:
        data = await asyncio.to_thread(listed, service.models.named)
        return JSONResponse({"object": "list", "data": data})

    return routes
