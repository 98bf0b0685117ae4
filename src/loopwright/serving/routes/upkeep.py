"""GET /health, which runs a step, and /metrics."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from ..service import Service


def router(service: Service) -> APIRouter:
    """The endpoints of whoever looks after the server."""
    routes = APIRouter(tags=["upkeep"])

    @routes.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "step_seconds": round(await service.health.check(), 4)})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
