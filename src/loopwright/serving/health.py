"""Whether the engine does what it is for: a small request run to its end, or steps of others that are seen to end well.

    health = Health(jobs, lifecycle, good_for=5.0)
    await health.check()                           # raises what is wrong

The outcome is kept for a few seconds, so that those who ask often do not make the work. Where requests wait for each
other for minutes, the small one would wait as well, and a server that works hard would be taken for one that does not.
"""

import asyncio
import time
from functools import partial

from ..api.model import Model
from ..card import whole
from ..engine.job import Job
from ..request import Frames, Request
from .jobs import Jobs
from .lifecycle import LOADED, Lifecycle
from .refusal import Refusal
from .tasks import unless

_PATIENCE = 60.0  # seconds; steps of large videos take their time


class Health:
    """Of the engine. The request is one of a model that is loaded; while none is, the engine only has to answer."""

    def __init__(self, jobs: Jobs, lifecycle: Lifecycle, good_for: float) -> None:
        self._jobs, self._lifecycle, self._good_for = jobs, lifecycle, good_for
        self._at, self._seconds = -good_for, 0.0
        self._checking = asyncio.Lock()

    async def check(self) -> float:
        """The seconds a step took to come back. Raises Refusal with status 503."""
        async with self._checking:
            if time.monotonic() - self._at >= self._good_for:
                self._seconds = await self._run()
                self._at = time.monotonic()
        return self._seconds

    async def _run(self) -> float:
        begun = time.monotonic()
        try:
            await self._ask()
        except Exception as error:
            raise Refusal(f"the engine does not work: {error}", status=503, code="unhealthy") from error
        return time.monotonic() - begun

    async def _ask(self) -> None:
        loaded = [model for name, model in self._lifecycle.named.items() if self._lifecycle.state(name) == LOADED]
        if not loaded:
            await asyncio.wait_for(asyncio.wrap_future(self._jobs.driver.call(lambda: None)), _PATIENCE)
            return
        make = partial(Job, loaded[0].instance, smallest(loaded[0]))
        await unless(
            self._jobs.stepped(),
            self._jobs.run(lambda listener: make(listener=listener), priority="high", seconds=_PATIENCE, probe=True),
        )


def smallest(model: Model) -> Request:
    """The least work that runs every part of a generator: one step on the smallest picture, not decoded."""
    card = model.card
    size = whole(card.settings, "size_multiple")
    black = Frames(bytes(size * size * 3), (1, size, size, 3))
    task, program = next(iter(card.programs.items()))
    return model.request(
        "a circle",
        task=task,
        image=black if "image" in program.inputs else None,
        video=black if "video" in program.inputs else None,
        height=size,
        width=size,
        num_frames=1,
        num_inference_steps=min(card.recipe.steps, default=1),
        strength=1.0,
        output="latents",
        mode="exact",
        seed=0,
    )
