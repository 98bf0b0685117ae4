"""A service on a port, until it is told to stop.

    sock = listen(settings)                        # refuses a port or a certificate before any weight is read
    run(Service(models, settings), sock)

SIGTERM and SIGINT drain: no new work, streams end, requests under way get `drain_seconds`, jobs are saved.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from ..errors import RequestError, StateError
from . import logs, tls
from .app import create_app
from .service import Service
from .settings import Settings

_CONNECTIONS = 1000


class Server(uvicorn.Server):
    """Leaves the process's signals to whoever runs it, and says `announcement` on stderr once it serves."""

    announcement = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises StateError where the service did not start; the log says why."""
        await super().startup(sockets)
        if not self.started:
            raise StateError("the server did not start", remedy="its log says why")
        if self.announcement:
            print(self.announcement, file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """None are captured."""
        yield


def listen(settings: Settings) -> socket.socket:
    """The socket, listening. Raises RequestError."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        tls.require(settings.tls_cert, settings.tls_key)
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return bound(settings.host, settings.port, family)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise RequestError(
            f"cannot listen on {where} ({error.strerror or error})", remedy="give another --port"
        ) from error


def bound(host: str, port: int, family: int = socket.AF_INET) -> socket.socket:
    """A listening socket; port 0 is any that is free. Raises OSError.

    What it accepts sends at once, as it does (TCP_NODELAY). asyncio sees to that only for sockets that name their
    protocol, which these do not; a client would wait 40 ms for the second part of every answer.
    """
    sock = socket.create_server((host, port), family=family, backlog=2048)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def server_of(service: Service) -> Server:
    """A server to be run in an event loop of one's own: `await server.serve(sockets=[sock])`."""
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=round(service.settings.drain_seconds),
        ws="none",
        ssl_certfile=service.settings.tls_cert,
        ssl_keyfile=service.settings.tls_key,
    )
    return Server(config)


def run(service: Service, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    logs.write(service.settings.log_format)
    asyncio.run(_serve(service, sock))


async def _serve(service: Service, sock: socket.socket) -> None:
    server, loop = server_of(service), asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = service.closing.is_set()  # whoever asks twice waits for nobody
        service.closing.set()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    host, port = sock.getsockname()[:2]
    scheme = "http" if service.settings.tls_cert is None else "https"
    server.announcement = f"serving {', '.join(service.models.named)} on {scheme}://{host}:{port}/v1"
    await server.serve(sockets=[sock])
