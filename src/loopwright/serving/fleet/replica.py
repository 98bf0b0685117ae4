"""A server of a fleet: the same application over an engine of its own on a port of this machine, and what it is asked.

    replica = Replica(order.dumps())
    url = replica.start()
    replica.offer("/v1/videos", '{"prompt": "a fox"}')      # JSON of an `Offer`
    replica.inherit(["/folder/replica-1"])         # what a dead one has left goes on here
    replica.run()                                  # until it ends

Everything but `start` may be called while others wait in `run`. What goes in and out is text.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ...card import experts
from ...engine.sizes import shape_of
from ...errors import LoopwrightError, StateError
from ...program import bind, task_of
from ..bodies import Body, ImageBody, RolloutBody, VideoBody
from ..models import Asked, Models
from ..order import Order
from ..refusal import Refusal
from ..server import Server, bound, server_of
from ..service import Service
from .router import Offer

BODIES: dict[str, type[ImageBody] | type[VideoBody]] = {
    "/v1/images/generations": ImageBody,
    "/v1/videos": VideoBody,
    "/rollout/generate": RolloutBody,
}
_POLL = 0.2  # seconds between two looks at an engine that may have ended
T = TypeVar("T")


class Replica:
    """Not yet started. None of its methods is a coroutine: Ray would run them all on one thread."""

    def __init__(self, order: str) -> None:
        self._order = Order.loads(order)
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, name="replica", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._server: Server
        self._service: Service

    def start(self) -> str:
        """Read weights, take up what an earlier run has left, and listen; the address. Raises what is in the way."""
        self._service = self._order.service()
        self._server = server_of(self._service)
        self._socket = bound("127.0.0.1", 0)
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            self._thread.join(0.02)
        self._raise()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Return once it has stopped, as asked. Raises StateError if its engine ends, or what else ended it."""
        while self._thread.is_alive():
            if self._service.driver.error is not None:
                raise StateError(f"the engine has ended ({self._service.driver.error})")
            self._thread.join(_POLL)
        self._raise()

    def stop(self) -> None:
        """Take nothing new, finish what is waited for, save the rest; `run` then returns."""

        def ask() -> None:
            self._service.closing.set()
            self._server.should_exit = True

        self._loop.call_soon_threadsafe(ask)

    def offer(self, path: str, body: str) -> str:
        """JSON of what this replica offers for a request with that body."""
        models = self._service.models.named.values()
        loaded = [(model.instance.loaded, experts(model.card)) for model in models]
        weights = sum(versions.get(name, 0) for versions, names in loaded for name in names)
        return json.dumps(asdict(Offer(self._service.driver.scheduler.left, self._price(path, body), weights)))

    def has(self, id: str) -> bool:
        """Whether the video or image of that id is here, whoever's it is."""
        return self._service.records.has(id)

    def made(self, owner: str, key: str) -> bool:
        """Whether a request under that Idempotency-Key has made its job here."""
        return self._service.records.by_key(owner, key) is not None

    def inherit(self, folders: list[str]) -> int:
        """Take over the jobs and results of replicas that have ended; how many. Jobs go on where they were saved."""
        taken = [record for folder in folders for record in self._service.records.inherit(Path(folder))]
        self._do(self._service.videos.recover())
        self._do(self._service.webhooks.recover())
        return len(taken)

    def _price(self, path: str, text: str) -> float | None:
        """Seconds by the prices of requests like it; None for one that is unlike all before it, or that is refused."""
        if path not in BODIES:
            return None
        try:
            asked = self._do(_asked(self._service.models, BODIES[path].model_validate_json(text)))
        except (ValidationError, LoopwrightError, Refusal):
            return None
        instance, prices = asked.model.instance, self._service.driver.scheduler.prices
        kind = repr((instance.digest, *shape_of(asked.request)))
        stages = bind(asked.model.card, asked.request, instance.loops)
        found = [prices.stage(kind, bound.stage.name) for bound in stages]
        return None if None in found else sum(steps * seconds for steps, seconds in filter(None, found))

    def _do(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _serve(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:
            self._error.append(error)

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]


async def _asked(models: Models, body: Body) -> Asked:
    """The request, complete."""
    card = models.get(body.model).card
    task = task_of(card, body.task if isinstance(body, VideoBody) else None, ())
    parameters = body.frames(card, task) if isinstance(body, VideoBody) else body.parameters()
    return await models.resolve(body.model, body.prompt, task, {}, parameters)
