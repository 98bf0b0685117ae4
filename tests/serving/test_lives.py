"""Who leaves, who waits, who is too many: what a request holds is given back, and what was promised is kept."""

import asyncio
import json
import logging
import socket
import threading
import time

import httpx
import pytest
from live import SMALL, served

from loopwright.serving.settings import Limits
from loopwright.serving.sse import EventStream, Sent

LONG = {**SMALL, "prompt": "a fox", "num_inference_steps": 200}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    limits = Limits(queue=3, concurrent=3)
    with served(checkpoint("t2v"), folder=tmp_path_factory.mktemp("lives"), limits=limits) as running:
        yield running


def until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def idle(server) -> bool:
    return len(server.service.driver.scheduler) == 0 and len(server.service.admission) == 0


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/rollout/generate", {}),
        ("/v1/images/generations", {}),
        ("/v1/images/generations", {"stream": True}),
        ("/v1/images/generations", {"stream": True, "partial_images": 2, "n": 2}),
    ],
)
def test_a_client_that_leaves_frees_the_engine_within_a_step(server, monkeypatch, path, extra):
    driver, cancelled = server.service.driver, {}
    cancel = driver.cancel

    def spy(job):
        cancelled.setdefault(job, job.index)
        cancel(job)

    monkeypatch.setattr(driver, "cancel", spy)
    body = json.dumps(LONG | extra).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: len(driver.scheduler) >= extra.get("n", 1))
        time.sleep(0.1)
    until(lambda: idle(server))
    assert len(cancelled) == extra.get("n", 1)
    for job, index in cancelled.items():
        assert job.status == "cancelled" and job.index <= index + 1 < 200 and not job.slots


def test_no_part_of_an_answer_is_held_back_until_another_is_acknowledged(server, monkeypatch):
    found = []

    def seen(loop, sock: socket.socket, protocol: object, *rest: object, **more: object) -> object:
        found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return made(loop, sock, protocol, *rest, **more)

    made = asyncio.SelectorEventLoop._make_socket_transport
    monkeypatch.setattr(asyncio.SelectorEventLoop, "_make_socket_transport", seen)
    assert httpx.get(f"{server.url}/livez").status_code == 200
    assert found == [1]


def test_a_client_that_leaves_before_its_body_has_come_is_no_fault_of_the_servers(server, caplog):
    caplog.set_level(logging.INFO, logger="loopwright.serving")
    head = f"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f'{head}Content-Length: 500\r\n\r\n{{"prompt": "a'.encode())
        time.sleep(0.1)
    until(lambda: "499" in caplog.text)
    assert "Traceback" not in caplog.text and not [one for one in caplog.records if one.levelno > logging.INFO]
    assert idle(server)


def test_a_video_is_made_whether_its_client_is_there_or_not_and_cancelled_when_asked(server):
    video = server.post("/v1/videos", **LONG, num_frames=5)
    assert video["status"] in ("queued", "in_progress")
    until(lambda: server.http.get(f"/v1/videos/{video['id']}").json()["progress"] > 0)
    under_way = server.http.get(f"/v1/videos/{video['id']}").json()
    assert under_way["status"] == "in_progress" and under_way["progress"] < 100
    assert server.http.get(f"/v1/videos/{video['id']}/content").status_code == 409
    assert server.http.post(f"/v1/videos/{video['id']}/cancel").json()["status"] == "cancelled"
    assert server.http.post(f"/v1/videos/{video['id']}/cancel").json()["status"] == "cancelled"
    until(lambda: idle(server))
    assert not list(server.service.records.files.iterdir())


def test_deleting_a_video_under_way_stops_it(server):
    video = server.post("/v1/videos", **LONG, num_frames=5)
    assert server.http.delete(f"/v1/videos/{video['id']}").json()["deleted"]
    until(lambda: idle(server))
    assert server.http.get(f"/v1/videos/{video['id']}").status_code == 404
    assert not list(server.service.records.files.iterdir())


def test_who_comes_when_the_queue_is_full_is_told_when_to_come_again(server):
    videos = [server.post("/v1/videos", **LONG, num_frames=5) for _ in range(3)]
    for path in ("/v1/videos", "/v1/images/generations", "/rollout/generate"):
        answer = server.http.post(path, json=LONG)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert "the queue is full: 3 of 3, and 1 more asked for" in answer.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    for video in videos:
        server.http.delete(f"/v1/videos/{video['id']}")
    until(lambda: idle(server))


def test_an_engine_that_is_busy_is_well_whoever_waits(server, monkeypatch):
    monkeypatch.setattr(server.service.health, "_good_for", 0.0)
    video = server.post("/v1/videos", **LONG, num_frames=5, priority="high")
    until(lambda: server.http.get(f"/v1/videos/{video['id']}").json()["progress"] > 0)
    monkeypatch.setattr(server.service.driver.scheduler, "_policy", lambda entry: entry.order)  # the probe comes last
    assert server.http.get("/health").json()["step_seconds"] < 5
    assert server.http.get(f"/v1/videos/{video['id']}").json()["status"] == "in_progress"
    server.http.delete(f"/v1/videos/{video['id']}")
    until(lambda: idle(server))


def test_what_comes_too_late_is_not_made(server):
    answer = server.http.post("/v1/images/generations", json=LONG | {"deadline": 0.05})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "deadline_exceeded")
    video = server.post("/v1/videos", **LONG, num_frames=5, deadline=0.05)
    done = server.openai.videos.poll(video["id"], poll_interval_ms=20)
    assert (done.status, done.error.code) == ("failed", "deadline_exceeded")
    until(lambda: idle(server))


def test_a_key_makes_one_video_however_often_it_is_sent(server):
    body = {**SMALL, "prompt": "a fox", "num_frames": 5}
    ids, threads = [], []

    def send() -> None:
        answer = server.http.post("/v1/videos", json=body, headers={"Idempotency-Key": "k"})
        ids.append(answer.json()["id"])

    for _ in range(3):
        threads.append(threading.Thread(target=send))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(ids) == 3 and len(set(ids)) == 1
    other = server.http.post("/v1/videos", json=body | {"seed": 9}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert server.openai.videos.poll(ids[0], poll_interval_ms=20).status == "completed"
    refused = server.http.post("/v1/images/generations", json=SMALL | {"prompt": "a"}, headers={"Idempotency-Key": "k"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_events_are_told_to_all_who_listen_and_again_to_who_was_away(server):
    video = server.post("/v1/videos", **SMALL, prompt="a fox", num_frames=5)
    url = f"/v1/videos/{video['id']}/events"

    def listen(last: str = "") -> list[tuple[str, str, dict[str, object]]]:
        text = server.http.get(url, headers={"Last-Event-ID": last}).text
        blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
        return [(block["id"], block["event"], json.loads(block["data"])) for block in blocks]

    live = listen()
    names = [name for _, name, _ in live]
    assert (names[0], names[1], names[-1]) == ("queued", "stage", "completed")
    steps = [data for _, name, data in live if name == "step" and data["stage"] == "denoise"]
    assert [(step["step"], step["steps"]) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    progress = [data["progress"] for _, name, data in live if name == "step"]
    assert progress == sorted(progress) and progress[-1] <= 99
    assert listen(live[3][0]) == live[4:]
    assert listen("another-3") == live


def test_a_dry_run_resolves_and_runs_nothing(server):
    for path in ("/v1/videos", "/v1/images/generations", "/rollout/generate"):
        answer = server.post(path, **SMALL, prompt="a fox", dry_run=True)
        assert (answer["object"], answer["parameters"]["num_inference_steps"]) == ("dry_run", 3)
    until(lambda: idle(server))


def test_what_happens_is_counted(server):
    server.post("/v1/images/generations", **SMALL, prompt="a fox")
    text = server.http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = next(iter(server.service.models.named))
    assert float(lines[f'loopwright_jobs_total{{model="{name}",status="done"}}']) >= 1
    assert float(lines[f'loopwright_stage_seconds_count{{model="{name}",stage="denoise"}}']) >= 1
    assert float(lines["loopwright_requests_under_way"]) == 0
    assert float(lines["loopwright_embedding_cache_hits_total"]) >= 1
    assert float(lines["loopwright_peak_memory_bytes"]) > 1e6
    path = 'loopwright_requests_total{method="POST",route="/v1/images/generations",status="200"}'
    assert float(lines[path]) >= 1


def test_a_fault_of_the_servers_own_is_told_without_detail_and_logged_with_it(server, monkeypatch, caplog):
    async def broken() -> float:
        raise KeyError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.health, "check", broken)
        answer = server.http.get("/health", headers={"X-Request-ID": "here"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["x-request-id"]) == (500, "internal", "here")
    assert (
        "secret" not in answer.text and "request here failed" in caplog.text and "KeyError: 'a secret'" in caplog.text
    )
    assert server.http.get("/health").status_code == 200


def test_a_request_leaves_one_line_in_the_log(server, caplog):
    caplog.set_level(logging.INFO, logger="loopwright.serving")
    server.http.get("/v1/videos/x?secret=1", headers={"X-Request-ID": "here"})
    # those who left before may be noted only now
    lines = lambda: [line for r in caplog.records if (line := getattr(r, "fields", {})).get("path") == "/v1/videos/x"]  # noqa: E731
    until(lines)  # it comes after the answer
    (line,) = lines()
    told = {"method": "GET", "status": 404, "owner": "anybody"}
    assert told.items() <= line.items() and line["seconds"] > 0


def test_a_connection_without_events_is_kept_open():
    async def slow():
        yield Sent("one", {"n": 1})
        await asyncio.sleep(0.2)
        yield Sent("two", {"n": 2})

    sent = []

    async def run() -> None:
        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message.get("body", b""))

        await EventStream(slow(), beat=0.01)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert sent[1] == b'event: one\ndata: {"n": 1}\n\n' and sent[2] == b": waiting\n\n"
    assert sent[-2:] == [b'event: two\ndata: {"n": 2}\n\n', b""]


def test_a_file_that_is_removed_as_it_is_asked_for_is_not_there(server):
    made = server.post("/v1/images/generations", prompt="a fox", **SMALL, response_format="url")["data"][0]["url"]
    (file,) = server.service.records.files.glob("image_*")
    file.unlink()
    answer = server.http.get(made)
    assert answer.status_code == 404 and "the file is removed" in answer.json()["error"]["message"]
