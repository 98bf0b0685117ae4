"""Images, made while their client waits: alone, several at once, or streamed with previews of what they will be.

made = await images.make(asked, body, owner)
async for sent in images.stream(asked, body, "image_generation"): ...
"""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial

import torch

from ..api.model import Model
from ..engine.job import Job
from ..program import check
from ..request import Request
from .bodies import FORMATS, ImageBody
from .jobs import Jobs
from .models import Asked
from .previews import Previews, decoding
from .records import COMPLETED, Record, Records, new_id
from .refusal import Refusal
from .settings import Limits
from .sse import Sent
from .tasks import stop, together
from .weights import ran_with

Answer = dict[str, object]
Send = Callable[..., Awaitable[None]]  # (kind of event, request, job, **fields)
_PLAIN = {"quality": "auto", "background": "opaque"}
_NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


class Images:
    """Makes images of requests that are resolved."""

    def __init__(self, jobs: Jobs, records: Records, limits: Limits) -> None:
        self._jobs, self._records, self._limits = jobs, records, limits

    def seeds(self, asked: Asked, count: int) -> list[Request]:
        """The request with `count` seeds, each one more than the last."""
        if not 1 <= count <= self._limits.images:
            raise Refusal(f"n must lie between 1 and {self._limits.images}: {count}", param="n")
        requests = [replace(asked.request, seed=asked.request.seed + i) for i in range(count)]
        for request in requests:
            check(asked.model.card, request)
        return requests

    async def make(self, asked: Asked, body: ImageBody, owner: str) -> list[Answer]:
        """All images, in the order of their seeds: contents or address, and seed."""
        return await together([self._one(asked, request, body, owner) for request in self.seeds(asked, body.n)])

    async def _one(self, asked: Asked, request: Request, body: ImageBody, owner: str) -> Answer:
        job = await self._jobs.run(
            lambda listener: Job(asked.model.instance, request, listener=listener),
            priority=body.priority,
            seconds=body.deadline,
        )
        suffix = FORMATS[body.output_format]
        if body.response_format == "url":
            record = await self._jobs.aside(lambda: self._kept(asked, job, suffix, owner))
            return {"url": f"/v1/images/{record.id}/content", "seed": request.seed, **ran_with(job)}
        contents = await self._jobs.aside(lambda: self._base64(asked.model, job, suffix))
        return {"b64_json": contents, "seed": request.seed, **ran_with(job)}

    def _kept(self, asked: Asked, job: Job, suffix: str, owner: str) -> Record:
        """The image as a file that its owner can ask for. Blocks."""
        now = time.time()
        record = Record(
            id=new_id("image"),
            owner=owner,
            model=asked.model.card.name,
            status=COMPLETED,
            created=now,
            ended=now,
            echo={**asked.echo, **ran_with(job)},
            suffix=suffix,
            kind="image",
        )
        path = self._jobs.result(asked.model, job).save(self._records.file(record))
        self._records.add(replace(record, bytes=path.stat().st_size))
        return record

    def _base64(self, model: Model, job: Job, suffix: str) -> str:
        """Blocks."""
        path = self._records.files / f"{new_id('image')}{suffix}"
        try:
            return base64.b64encode(self._jobs.result(model, job).save(path).read_bytes()).decode()
        finally:
            path.unlink(missing_ok=True)

    async def stream(self, asked: Asked, body: ImageBody, name: str) -> AsyncGenerator[Sent]:
        """Previews and images as they come; events are called as OpenAI's, `name` before the dot."""
        queue: asyncio.Queue[Sent | None] = asyncio.Queue()

        async def send(kind: str, request: Request, job: Job, **more: object) -> None:
            event = {"type": f"{name}.{kind}", "created_at": int(time.time()), "seed": request.seed, **_PLAIN, **more}
            event |= {"size": asked.echo["size"], "output_format": body.output_format}
            suffix = FORMATS[body.output_format]
            event["b64_json"] = await self._jobs.aside(lambda: self._base64(asked.model, job, suffix))
            queue.put_nowait(Sent(f"{name}.{kind}", event))

        async def work() -> None:
            try:
                await together([self._streamed(asked, one, body, send) for one in self.seeds(asked, body.n)])
            finally:
                queue.put_nowait(None)

        working = asyncio.ensure_future(work())
        try:
            while (sent := await queue.get()) is not None:
                yield sent
            await working
        finally:
            await stop(working)

    async def _streamed(self, asked: Asked, request: Request, body: ImageBody, send: Send) -> None:
        """One image, its previews before it."""
        loop, due = asyncio.get_running_loop(), asyncio.Queue[tuple[int, torch.Tensor] | None]()

        def tell(index: int, latents: torch.Tensor) -> None:
            loop.call_soon_threadsafe(due.put_nowait, (index, latents))

        async def show() -> None:
            while (preview := await due.get()) is not None:
                decode = partial(decoding, asked.model.instance, request, preview[1])
                await send("partial_image", request, await self._jobs.run(decode, priority="high"),
                           partial_image_index=preview[0])  # fmt: skip

        previews = Previews(body.partial_images, asked.model.card, tell)
        make = partial(Job, asked.model.instance, request, observers=[previews])
        ticket = await self._jobs.start(
            lambda listener: make(listener=listener), priority=body.priority, seconds=body.deadline
        )
        showing = asyncio.ensure_future(show())
        try:
            job = await self._jobs.finish(ticket)
            due.put_nowait(None)
            await showing
            echo = {name: value for name, value in asked.echo.items() if name != "seed"}
            await send("completed", request, job, usage=_NO_USAGE, **{**echo, **ran_with(job)})
        finally:
            await stop(showing)
