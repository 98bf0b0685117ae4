"""Everything that can be wrong with a request, as HTTP tells it: the one place that knows status codes.

raise Refusal("no such video", status=404, code="not_found")
status, body, headers = told(error)          # {"error": {"type", "message", "param", "code"}}
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import BackendError, CapacityError, LoopwrightError, MediaError, ModelError, StaleError, StateError
from ..request import Request

Told = tuple[int, dict[str, object], Mapping[str, str]]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
          429: "rate_limit_error"}  # fmt: skip
_CODES: dict[type[LoopwrightError], tuple[int, str]] = {
    MediaError: (400, "invalid_media"),
    BackendError: (400, "unsupported_here"),
    CapacityError: (400, "too_large"),
    ModelError: (422, "model_error"),
    StateError: (409, "state"),
    StaleError: (409, "stale"),
}
_OTHERWISE = (400, "invalid_request")
_PARAMETERS = tuple(field.name for field in fields(Request))


class Refusal(Exception):
    """A request that is not served, with what its client is told."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}


def code_of(error: Exception) -> str:
    """What kind of error it is, in a word."""
    if isinstance(error, Refusal):
        return error.code
    if isinstance(error, LoopwrightError):
        return _CODES.get(type(error), _OTHERWISE)[1]
    return "internal"


def told(error: Exception) -> Told:
    """Status, body and headers for an error. What is no fault of the request's is told without detail."""
    if isinstance(error, Refusal):
        return error.status, shape(str(error), error.status, error.code, error.param), error.headers
    if isinstance(error, LoopwrightError):
        status = _CODES.get(type(error), _OTHERWISE)[0]
        return status, shape(str(error), status, code_of(error), _param(str(error))), {}
    return 500, shape("something went wrong in the server; its log says what", 500, code_of(error)), {}


def shape(message: str, status: int, code: str, param: str | None = None) -> dict[str, object]:
    """An error as OpenAI's clients read it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"type": kind, "message": message, "param": param, "code": code}}


def invalid(error: ValidationError, known: Sequence[str]) -> Refusal:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"])[:80] or None
    if first["type"] == "extra_forbidden":
        return Refusal(
            f"unknown parameter: {param!r}; known: {', '.join(known)}", code="unknown_parameter", param=param
        )
    if first["type"] == "value_error":  # of a model's own check, which says what it is about
        return Refusal(str(first["ctx"]["error"]), param=param)
    return Refusal(f"{param or 'the body'}: {first['msg']}{_given(first)}", param=param)


def _given(detail: ErrorDetails) -> str:
    """The value that is wrong, where it is one that can be told."""
    value = detail["input"]
    if detail["type"] in ("missing", "json_invalid") or not isinstance(value, (str, int, float)):
        return ""
    told = repr(value[:80] if isinstance(value, str) else value)
    return f", not {told[:100]}"


def _param(message: str) -> str | None:
    """The parameter that an error of the engine's is about: the first it names."""
    found = re.search(rf"\b({'|'.join(_PARAMETERS)})\b", message.partition(":")[0])
    return found[1] if found else None
