"""What a video under way will be: its first frame, decoded from the clean latents that its last steps point to.

    glimpses = Glimpses(jobs, models)
    contents = await glimpses.see(record, ticket)          # bytes of a WebP

Only who looks pays: nothing is kept for those who do not. However many look at a job at once, one frame is decoded.
"""

import asyncio
import io
from dataclasses import replace
from functools import partial

import torch
from PIL import Image

from ..api.model import Model
from ..api.result import Result
from ..card import whole
from ..engine.job import Job
from ..loops.denoise import DenoiseState
from .jobs import Jobs
from .models import Models
from .previews import decoding
from .records import Record
from .refusal import Refusal
from .ticket import Ticket

_PATIENCE = 10.0  # seconds until the job's next step


class Glimpses:
    """On the event loop."""

    def __init__(self, jobs: Jobs, models: Models) -> None:
        self._jobs, self._models = jobs, models
        self._under_way: dict[str, asyncio.Task[bytes]] = {}

    async def see(self, record: Record, ticket: Ticket | None) -> bytes:
        """Raises Refusal while there is nothing to see: before denoising and after it."""
        if ticket is None or not ticket.started.is_set() or ticket.ended.is_set():
            raise _nothing()
        if record.id not in self._under_way:
            task = asyncio.create_task(self._see(self._models.get(record.model), ticket))
            self._under_way[record.id] = task
            task.add_done_callback(partial(self._seen, record.id))
        return await asyncio.shield(self._under_way[record.id])

    def _seen(self, id: str, task: asyncio.Task[bytes]) -> None:
        del self._under_way[id]
        if not task.cancelled():
            task.exception()  # told to who still waits, if anybody does

    async def _see(self, model: Model, ticket: Ticket) -> bytes:
        job = ticket.job
        try:
            latents = (await self._clean(model, job, ticket))[:, :, :1]
        except TimeoutError:
            raise _nothing() from None
        request = replace(job.request, num_frames=1, output="video")
        decoded = await self._jobs.run(partial(decoding, model.instance, request, latents), priority="high")
        return await self._jobs.aside(lambda: _file(self._jobs.result(model, decoded)))

    async def _clean(self, model: Model, job: Job, ticket: Ticket) -> torch.Tensor:
        """The latents where a line through two of the job's states meets sigma 0."""
        before = await self._state(job)
        async with asyncio.timeout(_PATIENCE):
            async for _ in ticket.watch(len(ticket.events)):
                after = await self._state(job)
                if after.index > before.index:
                    train_steps = whole(model.card.settings, "train_steps")
                    now, then = (float(before.table[state.index, 0]) / train_steps for state in (before, after))
                    return before.latents - now * (after.latents - before.latents) / (then - now)
        raise _nothing()

    async def _state(self, job: Job) -> DenoiseState:
        """As it is between two steps; its tensors are never written to."""
        state = await asyncio.wrap_future(self._jobs.driver.call(lambda: job.state))
        if not isinstance(state, DenoiseState) or state.index >= len(state.experts):
            raise _nothing()
        return state


def _file(result: Result) -> bytes:
    """Blocks."""
    video, file = result.video, io.BytesIO()
    assert video is not None
    Image.fromarray(video[0]).save(file, "WEBP")
    return file.getvalue()


def _nothing() -> Refusal:
    return Refusal("there is nothing to see yet, or any more", status=409, code="no_preview")
