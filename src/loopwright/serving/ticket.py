"""A job of the engine as the event loop knows it: what has happened, in order, and its end.

    ticket = Ticket(asyncio.get_running_loop())
    ticket.job = driver.submit(Job(model, request, listener=ticket.listen))
    async for number, event in ticket.watch():
        ...
    await ticket.ended

However many watch, and however slowly, the events are kept once, and few: a step is a line of numbers.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping

from ..engine.events import Artifact, Cancelled, Done, Event, Failed, Queued, Started, Stepped
from ..engine.job import Job

Told = Mapping[str, str | int | float | None]


class Ticket:
    """`listen` is called by the engine's thread, everything else on the event loop. `progress` is 0 to 100.

    `started` is set when the job's first stage begins, `ended` when nothing more will come of it. `expired` says that
    its deadline has passed, `alarm` waits for that; `stage_seconds` is what its steps took.
    """

    job: Job

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.events: list[Told] = []
        self.progress, self.expired = 0, False
        self.eta: float | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self._loop, self._closed = loop, False
        self._news, self._run = asyncio.Event(), uuid.uuid4().hex[:12]
        self.alarm: asyncio.TimerHandle | None = None
        self.stage_seconds: dict[str, float] = {}

    def number(self, id: str) -> int:
        """The number of the event with that id; 0 for an id of another run of the job."""
        run, _, number = id.partition("-")
        return int(number) if run == self._run and number.isdecimal() and len(number) < 10 else 0

    def id(self, number: int) -> str:
        """What a client that comes back says it has seen."""
        return f"{self._run}-{number}"

    def listen(self, event: Event) -> None:
        """Tell the event loop."""
        if not isinstance(event, Artifact):  # its tensors are worth a copy only to who shows them
            self._loop.call_soon_threadsafe(self._hear, event)

    def close(self, last: Told) -> None:
        """Nothing will be told after this; the job and what it made are let go."""
        self._tell(last)
        self._closed = True
        del self.job

    async def watch(self, after: int = 0) -> AsyncIterator[tuple[int, Told]]:
        """Events numbered from 1, those after number `after`, until the last."""
        while True:
            news = self._news
            while after < len(self.events):
                after += 1
                yield after, self.events[after - 1]
            if self._closed:
                return
            await news.wait()

    def _hear(self, event: Event) -> None:
        match event:
            case Queued():
                self._tell({"type": "queued"})
            case Started():
                self.started.set()
                self._tell({"type": "stage", "stage": event.stage})
            case Stepped():
                self._step(event)
            case Done() | Failed() | Cancelled():
                self.started.set()
                self.ended.set()

    def _step(self, event: Stepped) -> None:
        spent = self.stage_seconds.get(event.stage, 0.0) + event.seconds
        self.stage_seconds[event.stage] = spent
        self.eta = event.eta
        self.progress = max(self.progress, min(99, self._progress(event)))
        self._tell(
            {
                "type": "step",
                "stage": event.stage,
                "step": event.index,
                "steps": event.total,
                "seconds": round(event.seconds, 6),
                "eta": None if event.eta is None else round(event.eta, 3),
                "progress": self.progress,
            }
        )

    def _progress(self, event: Stepped) -> int:
        """By time where the time left is known, else by stages."""
        spent = sum(self.stage_seconds.values())
        if event.eta is not None:
            return int(100 * spent / (spent + event.eta)) if spent + event.eta else 0
        names = [bound.stage.name for bound in self.job.stages]
        return int(100 * (names.index(event.stage) + event.index / event.total) / len(names))

    def _tell(self, told: Told) -> None:
        self.events.append({**told, "at": round(time.time(), 3)})
        news, self._news = self._news, asyncio.Event()
        news.set()
