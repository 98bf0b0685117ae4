"""Several replicas behind one front: who gets what, what clients see of it, and what becomes of one that ends."""

import base64
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from fleets import fleet
from live import SMALL

import loopwright
from loopwright.engine.store import Store
from loopwright.serving.fleet.exposition import labelled
from loopwright.serving.fleet.router import NEAR, Offer, Router
from loopwright.serving.order import Order
from loopwright.serving.settings import Limits, Settings


@pytest.fixture(scope="module")
def two(checkpoint, tmp_path_factory):
    with fleet(checkpoint("t2v"), tmp_path_factory.mktemp("fleet"), 2) as running:
        yield running


def offers(*queued: float, own: float | None = 1.0, weights: tuple[int, ...] = ()) -> dict[str, Offer]:
    versions = weights or (1,) * len(queued)
    return {f"r{i}": Offer(one, own, version) for i, (one, version) in enumerate(zip(queued, versions, strict=True))}


# --- who gets what


def test_the_least_seconds_win_not_the_fewest_requests():
    assert Router().choose(offers(3.0, 2.0, 5.0), None, 0.0) == "r1"


def test_what_was_just_sent_counts_before_the_queue_shows_it():
    router = Router()
    chosen = [router.choose(offers(0.0, 0.0, 0.0, own=2.0), None, 0.0) for _ in range(6)]
    assert sorted(chosen) == ["r0", "r0", "r1", "r1", "r2", "r2"]
    assert router.choose(offers(4.0, 0.0, 4.0), None, 10.0) == "r1"


def test_a_prompt_has_a_home_as_long_as_that_is_near_the_least():
    homes = {prompt: Router().choose(offers(0.0, 0.0, 0.0), prompt, 0.0) for prompt in map(str, range(30))}
    assert set(homes.values()) == {"r0", "r1", "r2"}
    for prompt, home in homes.items():
        near = {name: Offer(NEAR * 0.9 if name == home else 0.0, 1.0, 1) for name in ("r0", "r1", "r2")}
        far = {name: Offer(NEAR * 1.1 if name == home else 0.0, 1.0, 1) for name in near}
        assert Router().choose(near, prompt, 0.0) == home != Router().choose(far, prompt, 0.0)
        without = {name: offer for name, offer in offers(0.0, 0.0, 0.0).items() if name != "r2"}
        assert home == "r2" or Router().choose(without, prompt, 0.0) == home


def test_replicas_with_older_weights_get_nothing_new():
    assert Router().choose(offers(0.0, 9.0, weights=(1, 2)), None, 0.0) == "r1"


def test_an_order_is_the_same_on_the_other_side(tmp_path):
    settings = Settings(folder=tmp_path / "f", limits=Limits(queue=7), model_roots=(), drain_seconds=1.5)
    order = Order(("a", "b"), {"device": "cpu", "lora": ("x:0.5",), "compile": True}, 2, settings)
    assert Order.loads(order.dumps()) == order and isinstance(
        Order.loads(order.dumps()).settings.folder, type(tmp_path)
    )


def test_metrics_of_replicas_are_told_apart():
    text = '# HELP a_total Things\n# TYPE a_total counter\na_total{kind="x"} 3.0\n'
    lines = labelled({"r0": text, "r1": text.replace("3.0", "4.0")}).decode().splitlines()
    assert lines.count("# TYPE a_total counter") == 1
    assert {line for line in lines if not line.startswith("#")} == {
        'a_total{kind="x",replica="r0"} 3.0',
        'a_total{kind="x",replica="r1"} 4.0',
    }


# --- what clients see


def test_images_of_a_fleet_are_those_of_the_engine_and_made_by_both(two, checkpoint):
    def ask(seed: int) -> bytes:
        answer = two.http.post("/v1/images/generations", json=SMALL | {"prompt": f"fox {seed}", "seed": seed})
        assert answer.status_code == 200, answer.text
        return base64.b64decode(answer.json()["data"][0]["b64_json"])

    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(ask, range(8)))
    model = loopwright.load(checkpoint("t2v"), device="cpu", store=Store())
    given = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 3, "max_sequence_length": 32}
    for seed, answer in enumerate(answers):
        path = two.members.all["replica-0"].order.settings.folder.parent / "alone.png"
        request = model.request(f"fox {seed}", seed=seed, mode="fixed", rows=1, **given)
        assert model.run(request).save(path).read_bytes() == answer
    metrics = two.http.get("/metrics").text.splitlines()
    done = [line for line in metrics if line.startswith("loopwright_jobs_total") and 'status="done"' in line]
    assert {name for name in ("replica-0", "replica-1") if any(name in line for line in done)} == set(two.members.all)


def test_openais_client_makes_and_lists_and_reads_videos_wherever_they_are(two):
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as client:
        body = {name: value for name, value in SMALL.items() if name != "size"} | {"num_frames": 5}
        made = [client.videos.create(prompt=f"{i}", size="32x32", extra_body=body).id for i in range(5)]
        assert all(client.videos.poll(video, poll_interval_ms=30).status == "completed" for video in made)
        listed = [video.id for video in client.videos.list(limit=2)]  # the client asks for page after page
        assert len(listed) == len(set(listed)) == 5 and set(listed) == set(made)
        contents = {client.videos.download_content(video).read() for video in made}
        assert len(contents) == 5
        part = two.http.get(f"/v1/videos/{made[0]}/content", headers={"Range": "bytes=3-9"})
        assert part.status_code == 206 and len(part.content) == 7
        owners = {name: member.hired.replica for name, member in two.members.all.items()}
        assert all(sum(replica.has(video) for replica in owners.values()) == 1 for video in made)
        for video in made:
            client.videos.delete(video)
        assert two.http.get(f"/v1/videos/{made[0]}").status_code == 404


def test_events_and_previews_come_as_they_are_made(two):
    body = SMALL | {"prompt": "a fox", "stream": True, "partial_images": 1}
    with two.http.stream("POST", "/v1/images/generations", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        names = [line[7:] for line in answer.iter_lines() if line.startswith("event: ")]
    assert names == ["image_generation.partial_image", "image_generation.completed"]


def test_who_leaves_the_front_leaves_the_replica(two):
    body = json.dumps(SMALL | {"prompt": "a fox", "num_inference_steps": 200}).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {two.url[7:]}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(two.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: any(len(scheduler) for scheduler in schedulers(two)))
    until(lambda: not any(len(scheduler) for scheduler in schedulers(two)))


def test_a_key_makes_one_video_wherever_it_is_sent(two):
    body = SMALL | {"prompt": "a fox", "num_frames": 5}
    made = {two.http.post("/v1/videos", json=body, headers={"Idempotency-Key": "k"}).json()["id"] for _ in range(4)}
    assert len(made) == 1
    other = two.http.post("/v1/videos", json=body | {"seed": 9}, headers={"Idempotency-Key": "k"})
    assert other.status_code == 409


def test_what_is_wrong_is_told_as_by_one_server(two):
    unknown = two.http.post("/v1/images/generations", json={"prompt": "a", "colour": "red"})
    assert unknown.status_code == 400 and "unknown parameter: 'colour'" in unknown.json()["error"]["message"]
    assert two.http.get("/v1/videos/video_x").status_code == 404
    assert two.http.get("/v1/videos?limit=0").status_code == 400
    assert two.http.get("/nothing").status_code == 404
    assert two.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert two.http.get("/livez").json() == {"status": "ok"}
    health = two.http.get("/health").json()
    assert health["status"] == "ok" and [one["status"] for one in health["replicas"]] == ["ok", "ok"]


# --- what becomes of one that ends


def test_a_drained_replica_leaves_its_jobs_to_another_which_finishes_them_with_the_same_bytes(checkpoint, tmp_path):
    body = SMALL | {"prompt": "a fox", "num_frames": 5, "num_inference_steps": 30}
    with fleet(checkpoint("t2v"), tmp_path / "fleet", 2) as running:
        made = [running.http.post("/v1/videos", json=body | {"seed": seed}).json()["id"] for seed in range(4)]
        until(lambda: all(len(scheduler) for scheduler in schedulers(running)))
        had = [video for video in made if running.members.all["replica-0"].hired.replica.has(video)]
        running.do(running.members.drain("replica-0"))
        assert [member.state for member in running.members.all.values()] == ["ready", "ready"]
        assert had and all(running.members.all["replica-1"].hired.replica.has(video) for video in had)
        assert running.http.get("/health").status_code == 200
        until(lambda: running.members.all["replica-0"].state == "ready")
        for video in made:
            until(lambda video=video: running.http.get(f"/v1/videos/{video}").json()["status"] == "completed")
        files = [running.http.get(f"/v1/videos/{video}/content").content for video in made]
        assert len(running.http.get("/v1/videos?limit=100").json()["data"]) == 4
    model = loopwright.load(checkpoint("t2v"), device="cpu", store=Store())
    given = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 30, "max_sequence_length": 32}
    for seed, content in enumerate(files):
        request = model.request("a fox", seed=seed, mode="fixed", rows=1, **given)
        assert model.run(request).save(tmp_path / "alone.mp4").read_bytes() == content


def test_a_smaller_fleet_finds_what_a_larger_one_has_left(checkpoint, tmp_path):
    body = SMALL | {"prompt": "a fox", "num_frames": 5, "num_inference_steps": 60}
    with fleet(checkpoint("t2v"), tmp_path, 2) as running:
        made = [running.http.post("/v1/videos", json=body).json()["id"] for _ in range(4)]
        assert all(len(scheduler) for scheduler in schedulers(running))
    with fleet(checkpoint("t2v"), tmp_path, 1) as running:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0"]
        for video in made:
            until(lambda video=video: running.http.get(f"/v1/videos/{video}").json()["status"] == "completed")


def schedulers(running):
    return [m.hired.replica._service.driver.scheduler for m in running.members.all.values() if m.state == "ready"]


def until(true, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
