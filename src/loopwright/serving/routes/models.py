"""GET /v1/models and /v1/models/{id}: what is served, and what it takes."""

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ..schema import described
from ..service import Service


def router(service: Service) -> APIRouter:
    """The endpoints of models."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models")
    async def every() -> Response:
        data = [described(model, service.limits) for model in service.models.named.values()]
        return JSONResponse({"object": "list", "data": data})

    @routes.get("/v1/models/{model_id:path}")
    async def one(model_id: str) -> Response:
        return JSONResponse(described(service.models.get(model_id), service.limits))

    return routes
