"""A request's body, read within bounds: JSON or a form, checked field by field; at most one file beside it.

    body, upload = await read(request, VideoBody, file="input_reference")

Nothing is fetched: a URL in the place of a file is refused.
"""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from .refusal import Refusal, invalid

B = TypeVar("B", bound=BaseModel)
_JSON_BYTES = 4 * 2**20
_FIELD_BYTES = 2**20
_FIELDS = 64


async def read(request: Request, kind: type[B], *, file: str | None = None) -> tuple[B, bytes | None]:
    """The body, and the contents of the file of that name if there is one."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal("compressed bodies are not read", status=415, code="unsupported_media_type")
    content = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content == "application/json":
        return _from_json(await request.body(), kind, file), None
    if content in ("multipart/form-data", "application/x-www-form-urlencoded"):
        return await _from_form(request, kind, file)
    raise Refusal(
        f"cannot read a body of type {content[:80]!r}; choices: application/json, multipart/form-data",
        status=415,
        code="unsupported_media_type",
    )


def _from_json(text: bytes, kind: type[B], file: str | None) -> B:
    if len(text) > _JSON_BYTES:
        raise Refusal(f"the JSON is too large; at most {_JSON_BYTES} bytes", status=413, code="body_too_large")
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        refused = invalid(error, known(kind, file))
        if file is not None and refused.param == file:
            remedy = "send it as a file in multipart/form-data; URLs are not fetched"
            raise Refusal(f"{file} is a file; {remedy}", param=file) from error
        raise refused from error


async def _from_form(request: Request, kind: type[B], file: str | None) -> tuple[B, bytes | None]:
    try:
        async with request.form(max_files=1, max_fields=_FIELDS, max_part_size=_FIELD_BYTES) as form:
            fields: dict[str, str] = {}
            upload: bytes | None = None
            for name, value in form.multi_items():
                if name in fields or (isinstance(value, UploadFile) and upload is not None):
                    raise Refusal(f"given twice: {name[:80]!r}", param=name[:80])
                if isinstance(value, UploadFile):
                    if name != file:
                        raise Refusal(f"no file is taken as {name[:80]!r}; choices: {file or 'none'}", param=name[:80])
                    upload = await value.read()
                elif name == file:
                    raise Refusal(f"{file} is a file, and URLs are not fetched; send its contents", param=file)
                else:
                    fields[name] = value
    except (HTTPException, MultiPartException) as error:
        detail = getattr(error, "detail", None) or getattr(error, "message", "")
        raise Refusal(f"the form cannot be read: {detail}"[:300], code="invalid_form") from error
    try:
        return kind.model_validate_strings(fields), upload
    except ValidationError as error:
        raise invalid(error, known(kind, file)) from error


def known(kind: type[BaseModel], file: str | None = None) -> list[str]:
    """The names a body may have."""
    return [*kind.model_fields, *([file] if file else [])]


def described(kind: type[BaseModel], file: str | None = None, *, required: bool = False) -> dict[str, object]:
    """The body for the OpenAPI document."""
    schema = kind.model_json_schema()
    content: dict[str, object] = {} if required else {"application/json": {"schema": schema}}
    if file is not None:
        properties = {**schema["properties"], file: {"type": "string", "format": "binary"}}
        names = [*schema.get("required", ()), *([file] if required else [])]
        content["multipart/form-data"] = {"schema": {**schema, "properties": properties, "required": names}}
    return {"requestBody": {"required": True, "content": content}}
