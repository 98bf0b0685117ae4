"""Models that come and go while a server serves, and who may ask for that."""

import asyncio
import base64
import io
import shutil
import threading
import time
import weakref

import numpy as np
import pytest
from live import SMALL, Running, served
from PIL import Image

import loopwright
from loopwright.errors import RequestError
from loopwright.serving.keys import new_key
from loopwright.serving.settings import Settings

IMAGE = SMALL | {"prompt": "a fox"}
LONG = SMALL | {"prompt": "a fox", "num_frames": 5, "num_inference_steps": 40}


@pytest.fixture(scope="module")
def managed(checkpoint, tmp_path_factory):
    """A server of two models, whose manager is alice; what else there is in its root; and bob's key."""
    folder = tmp_path_factory.mktemp("managed")
    root, outside = folder / "models", folder / "outside"
    for place in (root / "third", outside / "fourth"):
        shutil.copytree(checkpoint("t2v", "unipc"), place)
    (root / "link").symlink_to(outside / "fourth")
    alice, bob = new_key(folder / "keys", "alice"), new_key(folder / "keys", "bob")
    sources, access = [checkpoint("t2v"), checkpoint("ti2v")], {"keys": folder / "keys", "managers": ("alice",)}
    with served(*sources, folder=folder / "jobs", key=alice, model_roots=(root,), **access) as running:
        yield running, {"Authorization": f"Bearer {bob}"}


@pytest.fixture
def server(managed) -> Running:
    return managed[0]


def states(server: Running) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.http.get("/v1/models").json()["data"]}


def ask(server: Running, name: str):
    return server.http.post("/v1/images/generations", json=IMAGE | {"model": name})


def modules(server: Running, name: str) -> list[weakref.ref]:
    instance = server.service.models.named[name].instance
    return [weakref.ref(instance.part(part)) for part in ("transformer", "vae", "text_encoder")]


def test_what_is_unloaded_gives_its_memory_back_and_comes_again_with_the_same_bits(server):
    before, store = ask(server, "t2v-euler").json(), server.service.models.named["t2v-euler"].instance.store
    known, kept = modules(server, "t2v-euler"), modules(server, "ti2v-euler")
    components, cached = len(store), store.features.bytes
    gone = server.openai.models.delete("t2v-euler")
    assert gone.deleted and states(server) == {"t2v-euler": "unloaded", "ti2v-euler": "loaded"}
    assert [part() for part in known] == [None] * 3 and all(part() is not None for part in kept)
    assert len(store) < components and store.features.bytes < cached
    refused = ask(server, "t2v-euler")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_loaded")
    assert server.http.get("/v1/models/t2v-euler").json()["weights"] == {}
    assert [part() for part in known] == [None] * 3 and ask(server, "ti2v-euler").status_code == 200
    assert server.http.get("/health").json()["status"] == "ok"
    again = server.post("/v1/models", model="t2v-euler")
    assert (again["state"], again["weights"]) == ("loaded", {"transformer": 1})
    assert ask(server, "t2v-euler").json()["data"] == before["data"]


def test_a_model_that_is_used_is_drained_first(server):
    video = server.post("/v1/videos", **LONG, model="t2v-euler")
    leaving = threading.Thread(target=lambda: server.openai.models.delete("t2v-euler"))
    leaving.start()
    until = time.monotonic() + 10
    while states(server)["t2v-euler"] != "draining" and time.monotonic() < until:
        time.sleep(0.01)
    assert server.http.get(f"/v1/videos/{video['id']}").json()["status"] in ("queued", "in_progress")
    assert "is being unloaded" in ask(server, "t2v-euler").json()["error"]["message"]
    leaving.join()
    assert server.openai.videos.poll(video["id"], poll_interval_ms=20).status == "completed"
    assert states(server)["t2v-euler"] == "unloaded"
    server.post("/v1/models", model="t2v-euler")


def test_with_no_model_loaded_the_engine_still_answers(server):
    for name in ("t2v-euler", "ti2v-euler"):
        server.openai.models.delete(name)
    server.service.health._at = float("-inf")
    assert server.http.get("/health").json()["status"] == "ok"
    assert set(states(server).values()) == {"unloaded"} and len(server.service.lifecycle.named) == 2
    for name in ("t2v-euler", "ti2v-euler"):
        server.post("/v1/models", model=name)


def test_a_model_of_a_root_is_loaded_by_its_name(server, checkpoint):
    loaded = server.post("/v1/models", model="third")
    assert (loaded["id"], loaded["state"], loaded["sampler"]) == ("third", "loaded", "unipc")
    made = server.http.post("/v1/images/generations", json=IMAGE | {"model": "third", "mode": "exact"}).json()
    assert (made["model"], made["weights"]) == ("third", {"transformer": 1})
    small = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 3, "max_sequence_length": 32}
    alone = loopwright.load(checkpoint("t2v", "unipc"), device="cpu").generate("a fox", seed=3, **small)
    picture = Image.open(io.BytesIO(base64.b64decode(made["data"][0]["b64_json"])))
    assert np.array_equal(np.asarray(picture), alone.image)
    server.openai.models.delete("third")


@pytest.mark.parametrize(
    "name", ["../outside/fourth", "link", "", ".", "/etc", "x" * 500, "a\0b", "third/vae", "nobody"]
)
def test_nothing_outside_the_roots_is_loaded(server, name):
    answer = server.http.post("/v1/models", json={"model": name})
    assert answer.status_code == 404, answer.text
    assert "fourth" not in states(server)


def test_only_a_manager_loads_and_unloads(managed):
    server, bob = managed
    for answer in (
        server.http.post("/v1/models", json={"model": "t2v-euler"}, headers=bob),
        server.http.delete("/v1/models/t2v-euler", headers=bob),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    assert server.http.delete("/v1/models/t2v-euler", headers={"Authorization": ""}).status_code == 401
    assert states(server)["t2v-euler"] == "loaded"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"managers": ("alice",)}, "whoever loads models needs a key: 'alice'; give --keys FILE"),
        ({"model_roots": ("x",)}, "nobody may load models of: 'x'; give --manager NAME"),
        ({"idle_seconds": 0.0}, "a model is idle after a time above 0: 0.0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(RequestError, match=message):
        Settings(**settings)


def test_a_model_nobody_asks_for_lets_go_until_somebody_does(checkpoint, tmp_path):
    with served(checkpoint("t2v"), folder=tmp_path, idle_seconds=0.3) as server:
        first = ask(server, "t2v-euler").json()
        (transformer, *_) = modules(server, "t2v-euler")
        until = time.monotonic() + 10
        while states(server)["t2v-euler"] != "idle" and time.monotonic() < until:
            server.service.health._at = float("-inf")
            assert server.http.get("/health").status_code == 200  # which keeps nobody from being idle
            time.sleep(0.05)
        assert transformer() is None and states(server) == {"t2v-euler": "idle"}
        assert ask(server, "t2v-euler").json()["data"] == first["data"]


def test_weights_that_were_changed_in_memory_are_never_idle(checkpoint, tmp_path):
    with served(checkpoint("t2v"), checkpoint("ti2v"), folder=tmp_path, idle_seconds=1000.0) as server:
        lifecycle = server.service.lifecycle
        lifecycle.named["t2v-euler"].instance.changed("transformer")
        for one in lifecycle._served.values():
            one.used = float("-inf")
        asyncio.run(lifecycle.evict())
        assert states(server) == {"t2v-euler": "loaded", "ti2v-euler": "idle"}
