"""A fleet of replicas in this process, behind a front on a free port."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from live import free_port

from loopwright.serving.fleet.members import Hire, Members
from loopwright.serving.fleet.replica import Replica
from loopwright.serving.fleet.run import front_of
from loopwright.serving.order import Order
from loopwright.serving.settings import Settings

_LOADING = threading.Lock()  # transformers makes one model at a time in a process


class Local:
    """A replica on a thread."""

    def __init__(self, order: Order) -> None:
        self.replica = Replica(order.dumps())

    async def start(self) -> str:
        def alone() -> str:
            with _LOADING:
                return self.replica.start()

        return await asyncio.to_thread(alone)

    async def run(self) -> None:
        while self.replica._thread.is_alive():
            await asyncio.sleep(0.02)
        self.replica._raise()

    async def stop(self) -> None:
        if self.replica._thread.is_alive():
            self.replica.stop()

    async def kill(self) -> None:
        if self.replica._thread.is_alive():
            self.replica._server.should_exit = self.replica._server.force_exit = True
            await asyncio.to_thread(self.replica._thread.join)

    async def offer(self, path: str, body: str) -> str:
        return await asyncio.to_thread(self.replica.offer, path, body)

    async def has(self, id: str) -> bool:
        return self.replica.has(id)

    async def made(self, owner: str, key: str) -> bool:
        return self.replica.made(owner, key)

    async def inherit(self, folders: list[str]) -> int:
        return await asyncio.to_thread(self.replica.inherit, folders)


class Fleet:
    """Its `members` on its `loop`, and an HTTP client of its front."""

    def __init__(self, members: Members, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.members, self.url, self._loop = members, f"http://127.0.0.1:{port}", loop
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def do(self, work) -> object:
        """What a coroutine gives, on the fleet's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@contextmanager
def fleet(source: Path, folder: Path, count: int, hire: Hire | None = None, **settings: object) -> Iterator[Fleet]:
    """By default of replicas in this process."""
    order = Order((str(source),), {"device": "cpu"}, 1, Settings(folder=folder, port=free_port(), **settings))
    running: list[Fleet] = []
    begun, ended = threading.Event(), list[BaseException]()
    stop: list[object] = []

    async def main() -> None:
        members = Members(hire or (lambda name, order: Local(order)), order, count)
        closing, loop = asyncio.Event(), asyncio.get_running_loop()
        server = front_of(members, order.settings, closing)
        await members.start()
        try:
            running.append(Fleet(members, order.settings.port, loop))
            stop.append(lambda: (closing.set(), setattr(server, "should_exit", True)))
            with socket.create_server(("127.0.0.1", order.settings.port)) as sock:
                begun.set()
                await server.serve(sockets=[sock])
        finally:
            await members.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            ended.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        if not running:
            raise ended[0]
        yield running[0]
    finally:
        for ask in stop:
            running[0]._loop.call_soon_threadsafe(ask)
        thread.join()
        for one in running:
            one.http.close()
