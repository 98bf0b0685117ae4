"""GET /v1/videos/{id}/preview: the first frame of a video under way, as it will be."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..glimpse import Glimpses
from ..service import Service
from .asking import owner_of


def router(service: Service) -> APIRouter:
    """The endpoint of previews."""
    routes, glimpses = APIRouter(tags=["videos"]), Glimpses(service.jobs, service.models)

    @routes.get("/v1/videos/{video_id}/preview")
    async def preview(request: Request, video_id: str) -> Response:
        record = await service.videos.get(owner_of(request), video_id)
        contents = await glimpses.see(record, service.videos.ticket(record))
        return Response(contents, media_type="image/webp", headers={"Cache-Control": "no-store"})

    return routes
