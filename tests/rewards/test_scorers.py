"""Scorers elsewhere: what they are sent, what they may answer, and what becomes of each way in which they fail."""

import asyncio
import base64
import contextlib
import gzip
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from PIL import Image

from lettered import sample
from loopwright.errors import RequestError
from loopwright.rewards.remote import Remote
from loopwright.rewards.vision import Vision

LEVELS = (10, 60, 110, 160, 210)
SAMPLES = [sample(f"level {each}", np.full((4, 6, 3), each, np.uint8), kind="flat") for each in LEVELS]


class Service:
    """A server whose answers a test writes: `answer(number of the request, its body) -> (status, body)`."""

    def __init__(self) -> None:
        self.answer: Callable[[int, bytes], tuple[int, bytes]] = lambda number, body: (200, b"{}")
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.headers: dict[str, str] = {}
        self.pace = 0.0  # seconds between the bytes of an answer
        self.busy = self.most = 0
        lock, service = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with lock:
                    service.seen.append((self.path, dict(self.headers), body))
                    number, service.busy = len(service.seen), service.busy + 1
                    service.most = max(service.most, service.busy)
                try:
                    status, said = service.answer(number, body)
                finally:
                    with lock:
                        service.busy -= 1
                self.send_response(status)
                self.send_header("content-length", str(len(said)))
                for name, value in service.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if not service.pace:
                    self.wfile.write(said)
                    return
                for n in range(len(said)):
                    time.sleep(service.pace)
                    self.wfile.write(said[n : n + 1])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda request, address: None  # clients leave
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr("loopwright.rewards.wire.PAUSE", 0.01)


def mean_of_pngs(number: int, body: bytes) -> tuple[int, bytes]:
    """What a scorer written against the documented JSON would do."""
    rows = json.loads(body)["samples"]
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(row["frames"][0])))) for row in rows]
    return 200, json.dumps({"scores": [float(each.mean()) for each in pictures]}).encode()


def mean_of_bytes(number: int, body: bytes) -> tuple[int, bytes]:
    rows = msgpack.unpackb(body)["samples"]
    pictures = [np.frombuffer(row["frames"], np.uint8).reshape(row["shape"]) for row in rows]
    return 200, msgpack.packb({"scores": [float(each.mean()) for each in pictures]})


@pytest.mark.parametrize(("format", "answer"), [("json", mean_of_pngs), ("msgpack", mean_of_bytes)])
def test_both_formats_carry_pixels_exactly_and_scores_in_order(service, format, answer):
    service.answer = answer
    score = Remote(service.url, format=format, batch=2)
    assert score(SAMPLES) == [float(each) for each in LEVELS]
    assert len(service.seen) == 3 and score.failures == {}
    unpack = json.loads if format == "json" else msgpack.unpackb
    rows = [row for _, _, body in service.seen for row in unpack(body)["samples"]]
    assert sorted((row["prompt"], row["facts"]["kind"]) for row in rows) == sorted((s.prompt, "flat") for s in SAMPLES)
    score.close()


def test_what_passes_is_tried_again_and_what_does_not_is_not(service):
    service.answer = lambda number, body: (503, b"") if number < 3 else mean_of_pngs(number, body)
    assert Remote(service.url, batch=9, retries=2)(SAMPLES) == [float(each) for each in LEVELS]
    assert len(service.seen) == 3
    service.seen.clear()
    service.answer = lambda number, body: (400, b"")
    score = Remote(service.url, batch=9, retries=2)
    assert score(SAMPLES) == [None] * 5 and score.failures == {"status 400": 5} and len(service.seen) == 1


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"<html>", "not json"),
        (b'{"scores": [1, 2]}', "not one score a sample"),
        (b'{"scores": [1, 2, 3, 4, "5"]}', "a score that is no number"),
        (b'{"scores": [1, 2, 3, 4, NaN]}', "a score that is no number"),
        (b'{"scores": [1, 2, 3, 4, true]}', "a score that is no number"),
        (b'{"scores": [1, 2, 3, 4, 1%s]}' % (b"0" * 400), "a score that is no number"),
        (b'{"scores": [1, 2, 3, 4, 1%s]}' % (b"0" * 5000), "not json"),
        (b'{"scores": [1, 2, 3, 4, 1e999]}', "a score that is no number"),
        (b"[" * 100_000, "not json"),
        (b'{"scores": %s%s}' % (b"[" * 100_000, b"]" * 100_000), "not json"),
        (b'{"scores": [1, 2, 3, 4, "\xff"]}', "not json"),
        (b" " * 2**21, "more than 1048576 bytes"),
    ],
)
def test_what_is_no_answer_scores_nothing_and_is_counted(service, said, reason):
    service.answer = lambda number, body: (200, said)
    score = Remote(service.url, batch=9, retries=1)
    assert score(SAMPLES) == [None] * 5
    assert score.failures == {f"unreadable answer: {reason}": 5} and len(service.seen) == 2


def test_msgpack_that_is_none_scores_nothing_as_well(service):
    stamp = b"\xc7\x05\xff12345"  # a time of five bytes
    score = Remote(service.url, format="msgpack", batch=9, retries=0)
    for said in (
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        stamp,
        b"\x81\x90\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x01\x02",
        b"\xa1\xff",
    ):
        service.answer = lambda number, body, said=said: (200, said)
        assert score(SAMPLES) == [None] * 5
    assert score.failures == {"unreadable answer: not msgpack": 40}


def test_nobody_asked_for_a_compressed_answer(service):
    service.headers = {"content-encoding": "gzip, gzip"}
    service.answer = lambda number, body: (200, gzip.compress(gzip.compress(b'{"scores": [1, 2, 3, 4, 5]}')))
    score = Remote(service.url, batch=9, retries=1)
    assert score(SAMPLES) == [None] * 5 and service.seen[0][1]["accept-encoding"] == "identity"
    assert score.failures == {"unreadable answer: it is compressed": 5}


@pytest.mark.parametrize("line", [b"x: y\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
def test_headers_that_trickle_are_part_of_the_time(line):
    """The status that comes in the end would be another reason."""
    status = b"HTTP/1.1 404 Not Found\r\n"

    def trickle(server: socket.socket) -> None:
        client, _ = server.accept()
        with client, contextlib.suppress(OSError):
            client.recv(2**16)
            hints = line.startswith(b"HTTP")
            for each in [*([line] * 20), status] if hints else [status, *([line] * 20)]:
                client.sendall(each)
                time.sleep(0.1)
            client.sendall(b"content-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=trickle, args=(server,), daemon=True).start()
        score = Remote(f"http://127.0.0.1:{server.getsockname()[1]}", batch=9, retries=0, timeout=0.5)
        assert score(SAMPLES) == [None] * 5 and score.failures == {"no answer in time": 5}
        score.close()


def test_a_failed_request_costs_no_other_its_scores_and_null_is_a_failure(service):
    def answer(number: int, body: bytes) -> tuple[int, bytes]:
        if b"level 110" in body:
            return 500, b""
        return (200, b'{"scores": [null]}') if b"level 60" in body else mean_of_pngs(number, body)

    service.answer = answer
    score = Remote(service.url, batch=1, retries=1)
    assert score(SAMPLES) == [10.0, None, None, 160.0, 210.0]
    assert score.failures == {"status 500": 1, "no score from the service": 1}


@pytest.mark.parametrize("pace", [5.0, 0.05])
def test_a_service_that_hangs_or_trickles_is_given_up_in_time(service, pace):
    service.answer, service.pace = (lambda number, body: (200, b'{"scores": [1, 2, 3, 4, 5]}' + b" " * 100)), pace
    score, begun = Remote(service.url, batch=9, retries=1, timeout=0.3), time.monotonic()
    assert score(SAMPLES) == [None] * 5 and score.failures == {"no answer in time": 5}
    assert time.monotonic() - begun < 3


def test_nobody_there_is_a_failure_and_not_an_error():
    score = Remote("http://127.0.0.1:9", retries=1)
    assert score(SAMPLES) == [None] * 5
    assert score.failures == {"no connection (ConnectError)": 5}


def test_so_many_requests_at_a_time_and_no_more(service):
    def answer(number: int, body: bytes) -> tuple[int, bytes]:
        time.sleep(0.05)
        return mean_of_pngs(number, body)

    service.answer = answer
    assert None not in Remote(service.url, batch=1, concurrency=2)(SAMPLES * 3)
    assert service.most == 2


def test_the_key_comes_from_the_environment_and_only_there(service, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "secret")
    service.answer = mean_of_pngs
    Remote(service.url, key="SCORER_KEY")(SAMPLES)
    assert service.seen[0][1]["authorization"] == "Bearer secret"
    with pytest.raises(RequestError, match="NO_SUCH_KEY"):
        Remote(service.url, key="NO_SUCH_KEY")


def test_what_cannot_be_a_scorer_is_refused_at_once():
    addresses = [{"url": each} for each in ("scorer:80", "http://", "http://scorer:port")]
    for wrong in (*addresses, {"format": "pickle"}, {"batch": 0}, {"timeout": 0}, {"concurrency": 0}):
        with pytest.raises(RequestError):
            Remote(**{"url": "http://scorer", **wrong})
    for wrong in ({"low": 5.0, "high": 5.0}, {"frames": 0}, {"question": "{what}?"}):
        with pytest.raises(RequestError):
            Vision("http://judge", model="m", **wrong)


def said(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_a_judge_is_asked_in_openais_shape_and_its_number_scaled(service):
    service.answer = lambda number, body: said(" 7.5\n")
    score = Vision(f"{service.url}/v1/", model="judge", frames=2, concurrency=1)
    clip = sample("a fox", *(np.full((4, 6, 3), level, np.uint8) for level in (0, 9, 99)))
    assert score([clip]) == [0.75]
    ((path, _, body),) = service.seen
    content = json.loads(body)["messages"][0]["content"]
    shown = [part["image_url"]["url"].partition(",")[2] for part in content if part["type"] == "image_url"]
    assert path == "/v1/chat/completions" and json.loads(body)["model"] == "judge"
    assert "a fox" in content[-1]["text"] and "0" in content[-1]["text"] and "10" in content[-1]["text"]
    assert [int(np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))).max()) for each in shown] == [0, 99]


@pytest.mark.parametrize(
    "answer", [b"[" * 100_000, b"[]", b'{"choices": [{"message": null}]}', b'{"choices": {"0": 1}}', b"7", b"\xff"]
)
def test_a_judge_whose_answer_has_another_shape_gives_no_score(service, answer):
    service.answer = lambda number, body: (200, answer)
    score = Vision(service.url, model="judge", retries=0, concurrency=1)
    assert score(SAMPLES[:1]) == [None] and sum(score.failures.values()) == 1


@pytest.mark.parametrize("text", ["8/10", "Score: 8", "eight", "", "8 9", "11", "-1", "1e9", "nan"])
def test_a_judge_who_says_more_or_less_than_a_number_gives_no_score(service, text):
    service.answer = lambda number, body: said(text)
    score = Vision(service.url, model="judge", retries=1, concurrency=1)
    assert score(SAMPLES[:1]) == [None] and sum(score.failures.values()) == 1
    service.answer = lambda number, body: said(text if number == 3 else "5")
    assert score(SAMPLES[:1]) == [0.5], "a better answer to the next try counts"


def test_the_pause_doubles_and_a_busy_server_may_ask_for_more(service, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("loopwright.rewards.wire.PAUSE", 1.0)

    async def noted(seconds: float) -> None:
        pauses.append(seconds)

    clock = SimpleNamespace(**{**vars(asyncio), "sleep": noted})
    monkeypatch.setattr("loopwright.rewards.wire.asyncio", clock)
    service.answer = lambda number, body: (429, b"")
    assert Remote(service.url)(SAMPLES[:1]) == [None] and pauses == [1.0, 2.0, 4.0]
    service.headers, pauses[:] = {"retry-after": "3"}, []
    assert Remote(service.url)(SAMPLES[:1]) == [None] and pauses == [3.0, 3.0, 4.0]
