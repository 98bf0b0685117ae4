"""Replicas as actors of Ray: each a process of its own, with a GPU of its own where the models are to run on one.

    with placed(gpus=True, count=4) as hire:
        members = Members(hire, order, count=4)

Uses the Ray that this process is connected to, else starts one on this machine and stops it in the end. What travels is
text: orders, offers, names of folders. Requests and answers go over HTTP, past Ray.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...distributed import local_ray
from .. import logs
from ..order import Order
from .members import Hire
from .replica import Replica

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_CALLS = 16  # of one replica's methods at once, `run` among them


class Process(Replica):
    """A replica that has its process to itself."""

    def __init__(self, order: str) -> None:
        super().__init__(order)
        logs.write(Order.loads(order).settings.log_format)


class Actor:
    """A replica, as a coroutine for each of its methods."""

    def __init__(self, handle: "ActorHandle[Process]") -> None:
        self._handle = handle

    async def start(self) -> str:
        return str(await self._handle.start.remote())

    async def run(self) -> None:
        await self._handle.run.remote()

    async def stop(self) -> None:
        await self._handle.stop.remote()

    async def kill(self) -> None:
        import ray

        ray.kill(self._handle)

    async def offer(self, path: str, body: str) -> str:
        return str(await self._handle.offer.remote(path, body))

    async def has(self, id: str) -> bool:
        return bool(await self._handle.has.remote(id))

    async def made(self, owner: str, key: str) -> bool:
        return bool(await self._handle.made.remote(owner, key))

    async def inherit(self, folders: list[str]) -> int:
        return int(await self._handle.inherit.remote(folders))


@contextmanager
def placed(*, gpus: bool, count: int) -> Iterator[Hire]:
    """What starts a replica, for as long as Ray runs."""
    import ray

    own = local_ray.begin(cpus=count, gpus=None if gpus else 0, logs=True)

    def hire(name: str, order: Order) -> Actor:
        kind = ray.remote(Process).options(num_cpus=1, num_gpus=int(gpus), max_concurrency=_CALLS)
        return Actor(kind.remote(order.dumps()))  # type: ignore[arg-type]

    try:
        yield hire
    finally:
        if own:
            ray.shutdown()
