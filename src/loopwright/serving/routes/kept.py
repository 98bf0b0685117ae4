"""The file of a job, as an answer.

return await kept(service, record)     # answers ranges
"""

import asyncio

from starlette.responses import FileResponse, Response

from ..records import Record
from ..refusal import Refusal
from ..service import Service


async def kept(service: Service, record: Record, name: str | None = None) -> Response:
    """Under `name`, if it is to be saved. Raises Refusal for one that was removed since the record was read."""
    path = service.records.file(record)
    try:
        found = await asyncio.to_thread(path.stat)
    except FileNotFoundError:
        raise Refusal(f"the file is removed: {path.name!r}", status=404, code="not_found") from None
    return FileResponse(path, filename=name, stat_result=found)
