"""A fleet on a port, until it is told to stop.

    serve(order, replicas=4, sock=listen(order.settings))

SIGTERM and SIGINT stop it as they stop a server. SIGHUP replaces the replicas one after another, while others serve.
"""

import asyncio
import signal
import socket

import uvicorn

from ...backends.device import pick
from .. import logs
from ..keys import Keys
from ..order import Order
from ..server import Server
from ..settings import Settings
from .actors import placed
from .front import create_front
from .members import Hire, Members


def serve(order: Order, *, replicas: int, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    logs.write(order.settings.log_format)
    device = str(order.options.get("device", "auto"))
    with placed(gpus=pick(device).startswith("cuda"), count=replicas) as hire:
        asyncio.run(_serve(order, hire, replicas, sock))


def front_of(members: Members, settings: Settings, closing: asyncio.Event) -> Server:
    """A front to be run in an event loop of one's own: `await server.serve(sockets=[sock])`."""
    keys = None if settings.keys is None else Keys(settings.keys)
    config = uvicorn.Config(
        create_front(members, settings, keys, closing),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(settings.drain_seconds),
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    return Server(config)


async def _serve(order: Order, hire: Hire, replicas: int, sock: socket.socket) -> None:
    settings, closing, loop = order.settings, asyncio.Event(), asyncio.get_running_loop()
    members = Members(hire, order, replicas)
    server = front_of(members, settings, closing)
    renewing = set[asyncio.Task[None]]()

    def stop() -> None:
        server.force_exit = closing.is_set()  # whoever asks twice waits for nobody
        closing.set()
        server.should_exit = True

    def renew() -> None:
        renewing.add(task := asyncio.ensure_future(_renew(members)))
        task.add_done_callback(renewing.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, renew)
    await members.start()
    try:
        host, port = sock.getsockname()[:2]
        scheme = "http" if settings.tls_cert is None else "https"
        server.announcement = f"serving {', '.join(order.models)} on {scheme}://{host}:{port}/v1, {replicas} replicas"
        await server.serve(sockets=[sock])
    finally:
        await members.close()


async def _renew(members: Members) -> None:
    for name in list(members.all):
        await members.drain(name)
