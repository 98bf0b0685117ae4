"""What Prometheus is told, after requests that make it so."""

import json
import socket
import time
from typing import ClassVar

import pytest
from live import SMALL, Running
from prometheus_client.parser import text_string_to_metric_families

from loopwright.errors import ModelError
from loopwright.serving import images


def told(server: Running) -> dict[tuple[str, ...], float]:
    """The value of each sample, by its name and its labels' values in the order of their names."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        (sample.name.removeprefix("loopwright_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def name(server) -> str:
    return next(iter(server.service.models.named))


def test_calls_are_counted_with_their_rows_and_embeddings_with_what_they_cost(server, name):
    before, body = told(server), SMALL | {"prompt": "a fox that nobody has seen", "mode": "fixed", "rows": 2}
    for _ in range(2):
        server.post("/v1/images/generations", **body)
    after = told(server)

    def grown(*sample: str) -> float:
        return after[sample] - before.get(sample, 0.0)

    assert grown("call_rows_count", name, "denoise") == 2 * 3  # three steps, twice
    assert grown("call_rows_sum", name, "denoise") == 2 * grown("call_rows_count", name, "denoise")
    misses = grown("embedding_cache_misses_total")
    assert misses >= 1 and grown("embedding_cache_hits_total") >= misses and grown("embedding_cache_bytes") > 0
    assert grown("jobs_total", name, "done") == 2 and grown("stage_seconds_count", name, "denoise") == 2


def test_cancels_are_counted_by_their_reason(server, name):
    long = SMALL | {"prompt": "a fox", "num_inference_steps": 150}
    video = server.post("/v1/videos", **long, num_frames=5)
    server.http.post(f"/v1/videos/{video['id']}/cancel")
    assert server.http.post("/v1/images/generations", json=long | {"deadline": 0.05}).status_code == 422
    text = json.dumps(long).encode()
    head = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        until = time.monotonic() + 10
        while not server.service.jobs._live and time.monotonic() < until:
            time.sleep(0.01)
    until = time.monotonic() + 10
    while ("cancels_total", name, "client_left") not in (seen := told(server)) and time.monotonic() < until:
        time.sleep(0.02)
    assert [seen["cancels_total", name, reason] for reason in ("asked", "deadline", "client_left")] == [1, 1, 1]
    assert seen["jobs_total", name, "cancelled"] == 3


def test_failures_are_counted_by_their_kind(server, name, monkeypatch):
    class Broken(images.Job):
        errors: ClassVar = [ModelError("nothing finite"), KeyError("a bug")]

        def pending(self) -> None:
            self.fail(self.errors.pop(0))

    monkeypatch.setattr(images, "Job", Broken)
    answers = [server.http.post("/v1/images/generations", json=SMALL | {"prompt": "a fox"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [422, 500]
    seen = told(server)
    assert [seen["failures_total", kind, name] for kind in ("model_error", "internal")] == [1, 1]
