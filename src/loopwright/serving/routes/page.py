"""GET /, the page for people, and its parts under /page/: the files beside this package, each with its own type.

What the page may do is said in one header: scripts and styles of this server alone, none of them inline, and no text
that becomes markup.
"""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from ..refusal import Refusal

INDEX = "index.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def router() -> APIRouter:
    """The page's files, read once; no name a client gives reaches the file system."""
    routes = APIRouter(include_in_schema=False)
    parts = {part.name: part.read_bytes() for part in files("loopwright.serving").joinpath("page").iterdir()}

    @routes.get("/")
    async def index() -> Response:
        return _answer(INDEX, parts[INDEX])

    @routes.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in parts:
            raise Refusal(f"no such part of the page: {name[:80]!r}", status=404, code="not_found", param="name")
        return _answer(name, parts[name])

    return routes


def _answer(name: str, content: bytes) -> Response:
    kind = _TYPES[name[name.rindex(".") :]]
    return Response(content, media_type=kind, headers=_HEADERS)
