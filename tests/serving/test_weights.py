"""Weights that are replaced over HTTP: every answer is of one version, and says of which."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from live import SMALL, Running, served
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

import loopwright
from loopwright.engine.job import Job
from loopwright.engine.store import Store
from loopwright.serving.keys import new_key

NAME = "transformer"
ASKED = {"prompt": "a fox", "size": "32x32", "num_frames": 1, "num_inference_steps": 2, "max_sequence_length": 32,
         "trajectory": False, "guidance_scale": 1.0}  # fmt: skip
VERSIONS = 4


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory) -> Path:
    """A root with weights of several versions, one that does not fit, and a link that leads out of it."""
    folder = tmp_path_factory.mktemp("syncs")
    root = folder / "root"
    root.mkdir()
    state = loopwright.load(checkpoint("t2v"), device="cpu", store=Store(0)).instance.part(NAME).state_dict()
    for number in range(VERSIONS):
        generator = torch.Generator().manual_seed(number)
        weights = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in state.items()}
        save_file(weights, root / f"v{number}.safetensors")
    save_file({n: t[:1] for n, t in state.items()}, root / "small.safetensors")
    (folder / "secret.safetensors").write_bytes((root / "v0.safetensors").read_bytes())
    (root / "link").symlink_to(folder / "secret.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(checkpoint, place) -> Running:
    alice, bob = new_key(place / "keys", "alice"), new_key(place / "keys", "bob")
    access = {"keys": place / "keys", "managers": ("alice",), "model_roots": (place / "root",)}
    with served(checkpoint("t2v"), folder=place / "jobs", key=alice, **access) as running:
        running.bob = {"Authorization": f"Bearer {bob}"}
        yield running


@pytest.fixture(scope="module")
def serial(checkpoint, place):
    """What a model gives alone that has had these weights and no others."""
    made, known = {}, {}

    def latents(number: int, seed: int) -> torch.Tensor:
        if number not in made:
            made[number] = loopwright.load(checkpoint("t2v"), device="cpu", store=Store())
            made[number].update_weights(NAME, place / "root" / f"v{number}.safetensors")
        if (number, seed) not in known:
            parameters = {n: v for n, v in ASKED.items() if n not in ("prompt", "size", "trajectory")}
            known[number, seed] = (
                made[number]
                .generate("a fox", height=32, width=32, seed=seed, output="latents", mode="fixed", rows=1, **parameters)
                .latents
            )
        return known[number, seed]

    return latents


def update(server: Running, number: int, **more: object) -> dict[str, object]:
    answer = server.http.post("/update_weights_from_disk", json={"path": f"v{number}.safetensors", **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rollout(server: Running, seed: int) -> tuple[torch.Tensor, dict[str, object], dict[str, object]]:
    """Latents, what the answer says, and the record."""
    answer = server.http.post("/rollout/generate", json=ASKED | {"seed": seed})
    assert answer.status_code == 200, answer.text
    head = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])["__metadata__"]
    return load_tensors(answer.content)["latents"], json.loads(head["answer"]), json.loads(head["loopwright"])


def under_load(server: Running, serial, requests: int, syncs: int) -> None:
    """Clients ask all the time while weights come by every policy; each answer is that of its own version, alone."""
    chance, numbers, done = random.Random(0), {}, threading.Event()

    def replace() -> None:
        begun = server.http.get("/health").json()["weights"]["t2v-euler"][NAME]
        for index in range(syncs):
            number = chance.randrange(VERSIONS)
            numbers[begun + 1 + index] = number
            told = update(server, number, policy=chance.choice(("drain", "finish")))
            assert told["version"] == begun + 1 + index
            time.sleep(0.002 * chance.randrange(5))
        done.set()

    update(server, 0)
    numbers[server.http.get("/health").json()["weights"]["t2v-euler"][NAME]] = 0
    with ThreadPoolExecutor(7) as pool:
        replacing = pool.submit(replace)
        asked = [(index % 5, pool.submit(rollout, server, index % 5)) for index in range(requests)]
        answers = [(seed, future.result()) for seed, future in asked]
        replacing.result()
    checksums: dict[int, set[str]] = {}
    for seed, (latents, told, record) in answers:
        version = told["weights"][NAME]
        assert torch.equal(latents, serial(numbers[version], seed)), f"version {version}, seed {seed}"
        assert record["weights"][NAME] == {"version": version, "checksum": told["checksums"][NAME]}
        checksums.setdefault(numbers[version], set()).add(told["checksums"][NAME])
    assert len({told["weights"][NAME] for _, (_, told, _) in answers}) > min(3, syncs // 4)
    assert all(len(found) == 1 for found in checksums.values())
    instance = server.service.models.named["t2v-euler"].instance
    assert len(instance.store.residence._residents) == 3, "copies have been let go"


def test_every_answer_under_load_is_that_of_its_own_version_alone(server, serial):
    under_load(server, serial, requests=60, syncs=12)


@pytest.mark.slow
def test_a_hundred_syncs_during_a_thousand_requests(server, serial):
    under_load(server, serial, requests=1000, syncs=100)


def test_images_and_videos_say_which_weights_made_them(server):
    version = update(server, 1)["version"]
    image = server.post("/v1/images/generations", prompt="a fox", **SMALL)
    assert image["weights"] == image["data"][0]["weights"] == {NAME: version}
    video = server.post("/v1/videos", prompt="a fox", num_frames=1, **SMALL)
    done = server.openai.videos.poll(video["id"], poll_interval_ms=30)
    assert (done.status, done.weights, done.checksums) == ("completed", {NAME: version}, image["checksums"])
    (listed,) = server.http.get("/get_weights_checksum").json()["data"]
    assert listed == {"model": "t2v-euler", "component": NAME, "version": version, "replaced": True,
                      "checksum": image["checksums"][NAME]}  # fmt: skip


def test_a_swap_in_the_middle_of_a_rollout_is_for_those_that_follow(server, serial):
    update(server, 0)
    jobs, seen, go = server.service.jobs, threading.Event(), threading.Event()

    class Slow:
        def on_step(self, job, step, key, result):
            if step.unit.value == "denoise" and job.index == 0:
                seen.set()
                go.wait(10)

    model = server.service.models.named["t2v-euler"]
    request = model.request("a fox", height=32, width=32, num_frames=1, num_inference_steps=2, seed=1, output="latents",
                            max_sequence_length=32, guidance_scale=1.0, mode="fixed", rows=1)  # fmt: skip
    for follows, status in ((False, 409), (True, 200)):
        seen.clear(), go.clear()
        job = Job(model.instance, request, observers=[Slow()], follows=follows)
        jobs.driver.submit(job)
        seen.wait(10)
        answer = server.http.post("/update_weights_from_disk", json={"path": "v2.safetensors", "policy": "freeze"})
        go.set()
        assert answer.status_code == status, answer.text
        while not job.ended:
            time.sleep(0.01)
    assert not any(torch.equal(job.output["latents"], serial(number, 1)) for number in (0, 2))
    assert len(job.weights_before) == 1


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"path": "../secret.safetensors"}, 404, "no such weights"),
        ({"path": "/etc/passwd"}, 404, "no such weights"),
        ({"path": "link"}, 404, "no such weights"),
        ({"path": "."}, 404, "no such weights"),
        ({"path": "v0\0"}, 404, "no such weights"),
        ({"path": "nothing"}, 404, "no such weights"),
        ({"path": "small.safetensors"}, 400, "do not fit"),
        ({"path": "v0.safetensors", "component": "tokenizer"}, 400, "no such component"),
        ({"path": "v0.safetensors", "component": "engine"}, 400, "no such component"),
        ({"path": "v0.safetensors", "model": "none"}, 404, "no such model"),
        ({"path": "v0.safetensors", "version": 1}, 400, "larger than the present one"),
        ({"path": "v0.safetensors", "policy": "hurry"}, 400, "policy"),
        ({"path": "v0.safetensors", "tensors": []}, 400, "unknown parameter"),
    ],
)
def test_what_cannot_be_is_refused_and_the_weights_are_as_they_were(server, body, status, told):
    before = server.http.get("/get_weights_checksum").json()
    answer = server.http.post("/update_weights_from_disk", json=body)
    assert answer.status_code == status and told in answer.json()["error"]["message"]
    assert server.http.get("/get_weights_checksum").json() == before


def test_only_managers_replace_weights(server):
    body = {"path": "v0.safetensors"}
    assert server.http.post("/update_weights_from_disk", json=body, headers=server.bob).status_code == 403
    nobody = server.http.post("/update_weights_from_disk", json=body, headers={"Authorization": ""})
    assert nobody.status_code == 401


def test_a_server_that_stops_does_not_wait_for_a_drain(checkpoint, place, tmp_path):
    key = new_key(tmp_path / "keys", "alice")
    access = {"keys": tmp_path / "keys", "managers": ("alice",), "model_roots": (place / "root",)}
    with served(checkpoint("t2v"), folder=tmp_path / "jobs", key=key, drain_seconds=0.1, **access) as running:
        model = running.service.models.named["t2v-euler"]
        stuck = Job(model.instance, model.request("a fox"))
        assert stuck.pending() is not None
        url, told, header = f"{running.url}/update_weights_from_disk", [], {"Authorization": f"Bearer {key}"}
        asking = {"json": {"path": "v0.safetensors"}, "headers": header, "timeout": 60}
        thread = threading.Thread(target=lambda: told.append(httpx.post(url, **asking).status_code))
        thread.start()
        while model.instance.crew._open:
            time.sleep(0.01)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    thread.join(10)
    assert told != [200] and model.instance.version(NAME) == 1
