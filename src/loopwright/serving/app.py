"""The ASGI application of a service.

app = create_app(Service(models, settings))
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from .. import __version__
from ..errors import LoopwrightError
from .gate import Gate
from .refusal import Refusal, shape, told
from .routes import images, models, page, preview, rollout, upkeep, videos, weights
from .service import Service

_log = logging.getLogger("loopwright.serving")


def create_app(service: Service) -> FastAPI:
    """Everything a client can reach; started and stopped with the application's lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="Loopwright",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry={"operation_spans": False},  # the request's own span, where the process has a tracer provider
    )
    for routes in (images, videos, preview, models, rollout, weights, upkeep):
        app.include_router(routes.router(service))
    app.include_router(page.router())
    for error in (Refusal, LoopwrightError):
        app.add_exception_handler(error, _answer)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_middleware(
        Gate,
        settings=service.settings,
        keys=service.keys,
        metrics=service.metrics,
        closing=service.closing.is_set,
    )
    return app


async def _answer(request: Request, error: Exception) -> JSONResponse:
    status, body, headers = told(error)
    return JSONResponse(body, status, dict(headers))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Of a path or a query; bodies are read by `intake`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return JSONResponse(shape(f"{param}: {first['msg']}", 400, "invalid_request", param), 400)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    """No such path, or not that way."""
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "invalid_request"
    return JSONResponse(shape(str(error.detail), error.status_code, code), error.status_code, error.headers)
