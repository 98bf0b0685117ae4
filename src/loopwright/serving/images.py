"""Images, made while their client waits: alone, several at once, or streamed with previews of what they will be.

answer = await images.make(asked, body, owner)
async for sent in images.stream(asked, body, "image_generation"): ...
"""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
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

Answer = dict[str, object]
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

    async def make(self, asked: Asked, body: ImageBody, owner: str) -> Answer:
        """The answer with all images, in the order of their seeds."""
        begun = int(time.time())
        data = await together([self._one(asked, request, body, owner) for request in self.seeds(asked, body.n)])
        return {"created": begun, "data": data, "output_format": body.output_format, **asked.echo}

    async def _one(self, asked: Asked, request: Request, body: ImageBody, owner: str) -> Answer:
        job = await self._jobs.run(
            lambda listener: Job(asked.model.instance, request, listener=listener),
            priority=body.priority,
            seconds=body.deadline,
        )
        if body.response_format == "url":
            record = await self._keep(asked, job, FORMATS[body.output_format], owner)
            return {"url": f"/v1/images/{record.id}/content", "seed": request.seed}
        return {"b64_json": await self._base64(asked.model, job, body), "seed": request.seed}

    async def _keep(self, asked: Asked, job: Job, suffix: str, owner: str) -> Record:
        now = time.time()
        record = Record(
            id=new_id("image"),
            owner=owner,
            model=asked.model.card.name,
            status=COMPLETED,
            created=now,
            ended=now,
            echo=asked.echo,
            suffix=suffix,
            kind="image",
        )
        path = await self._jobs.encode(asked.model, job, self._records.file(record))
        record = replace(record, bytes=path.stat().st_size)
        await asyncio.to_thread(self._records.add, record)
        return record

    async def _base64(self, model: Model, job: Job, body: ImageBody) -> str:
        path = self._records.files / f"{new_id('image')}{FORMATS[body.output_format]}"

        def encode() -> str:
            try:
                return base64.b64encode(model.result(job).save(path).read_bytes()).decode()
            finally:
                path.unlink(missing_ok=True)

        return await self._jobs.aside(encode)

    async def stream(self, asked: Asked, body: ImageBody, name: str) -> AsyncIterator[Sent]:
        """Previews and images as they come; events are called as OpenAI's, `name` before the dot."""
        queue: asyncio.Queue[Sent | None] = asyncio.Queue()
        requests = self.seeds(asked, body.n)

        async def work() -> None:
            try:
                await together([self._streamed(asked, request, body, name, queue) for request in requests])
            finally:
                queue.put_nowait(None)

        working = asyncio.ensure_future(work())
        try:
            while (sent := await queue.get()) is not None:
                yield sent
            await working
        finally:
            await stop(working)

    async def _streamed(
        self, asked: Asked, request: Request, body: ImageBody, name: str, queue: "asyncio.Queue[Sent | None]"
    ) -> None:
        """One image, its previews before it."""
        loop, due = asyncio.get_running_loop(), asyncio.Queue[tuple[int, torch.Tensor] | None]()

        def tell(index: int, latents: torch.Tensor) -> None:
            loop.call_soon_threadsafe(due.put_nowait, (index, latents))

        async def show() -> None:
            while (preview := await due.get()) is not None:
                index, latents = preview
                job = await self._jobs.run(partial(decoding, asked.model.instance, request, latents), priority="high")
                await send("partial_image", job, partial_image_index=index)

        async def send(kind: str, job: Job, **more: object) -> None:
            event = {"type": f"{name}.{kind}", "created_at": int(time.time()), "seed": request.seed, **_PLAIN, **more}
            event |= {"size": asked.echo["size"], "output_format": body.output_format}
            event["b64_json"] = await self._base64(asked.model, job, body)
            queue.put_nowait(Sent(f"{name}.{kind}", event))

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
            await send("completed", job, usage=_NO_USAGE, **{k: v for k, v in asked.echo.items() if k != "seed"})
        finally:
            await stop(showing)
