"""GET /health, which runs a step, /livez, which only asks whether there is an engine, and /metrics."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from ..refusal import Refusal
from ..service import Service
from ..weights import versions


def router(service: Service) -> APIRouter:
    """The endpoints of whoever looks after the server."""
    routes = APIRouter(tags=["upkeep"])

    @routes.get("/health")
    async def health() -> Response:
        took = round(await service.health.check(), 4)
        return JSONResponse({"status": "ok", "step_seconds": took, "weights": versions(service.models.named)})

    @routes.get("/livez")
    async def live() -> Response:
        if (error := service.driver.error) is not None:
            raise Refusal(f"the engine has ended ({type(error).__name__})", status=503, code="engine_ended")
        return JSONResponse({"status": "ok"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
