"""Lines of the log, for people or as JSON, each with the id of the request that it is about.

    write("json")                                  # to stderr, from now on
    with about("request-id"):
        log.info("told", extra={FIELDS: {"seconds": 0.1}})

What a request has started goes on under its id: tasks take it with them.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FIELDS = "fields"  # what a line says beside its message, as JSON values by name
_request: ContextVar[str] = ContextVar("request", default="")


@contextmanager
def about(request: str) -> Iterator[None]:
    """Lines of the `with` block, and of tasks begun in it, are about the request of that id."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


class JsonLines(logging.Formatter):
    """One JSON object a line: at (seconds since 1970), level, message, request_id, the line's fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback is text within it."""
        line = {"at": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {"request_id": _request.get()} if _request.get() else {}
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Time of day, level, message, and the request's id; a traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        request = f" [{_request.get()}]" if _request.get() else ""
        line = f"{at} {record.levelname.lower()} {record.getMessage()}{request}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def write(form: str) -> None:
    """What the server says, and what uvicorn warns of, on stderr in that form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[form]())
    for name, level in (("loopwright.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # warns of every broken form
