"""A real server on a free port, in a thread of the tests' process, and clients of it."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import openai

import loopwright
from loopwright.engine.instance import Store
from loopwright.serving.server import listen, server_of
from loopwright.serving.service import Service
from loopwright.serving.settings import Settings

SMALL = {"size": "32x32", "num_inference_steps": 3, "seed": 3, "max_sequence_length": 32}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Running:
    """A served model: its `service`, its address, an HTTP client and OpenAI's."""

    def __init__(self, service: Service, port: int, key: str = "none") -> None:
        self.service, self.port, self.url = service, port, f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {key}"})
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, **body: object) -> dict[str, object]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def served(*sources: object, folder: Path, key: str = "none", **settings: object) -> Iterator[Running]:
    store = Store()
    models = [loopwright.load(source, device="cpu", store=store) for source in sources]
    chosen = Settings(folder=folder, port=free_port(), **settings)
    with listen(chosen) as sock:
        service = Service(models, chosen, partial(loopwright.load, device="cpu", store=store))
        server = server_of(service)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        running = Running(service, chosen.port, key)
        try:
            yield running
        finally:
            running.http.close()
            running.openai.close()
            server.should_exit = True
            thread.join()
