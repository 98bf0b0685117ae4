"""Keys, and what they keep apart; where a server may listen."""

import stat

import pytest
from live import SMALL, served

from loopwright.cli import main
from loopwright.errors import RequestError
from loopwright.serving.keys import Keys, new_key
from loopwright.serving.server import listen
from loopwright.serving.settings import Limits, Settings


def test_a_file_of_keys_holds_none(tmp_path):
    path = tmp_path / "keys"
    alice, bob = new_key(path, "alice"), new_key(path, "bob")
    text = path.read_text()
    assert alice not in text and bob not in text and stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = Keys(path)
    assert [keys.owner(key) for key in (alice, bob, alice[:-1], "", "é\udcff")] == ["alice", "bob", None, None, None]
    with pytest.raises(RequestError, match="the file has a key of that name: 'bob'"):
        new_key(path, "bob")
    path.write_text(f"{text}eve {alice}\n")
    with pytest.raises(RequestError, match="keys:3 is not a name and a hash"):
        Keys(path)


def test_the_command_makes_a_key(tmp_path, capsys):
    path = tmp_path / "keys"
    assert main(["serve", "--keys", str(path), "--new-key", "alice"]) == 0
    assert Keys(path).owner(capsys.readouterr().out.strip()) == "alice"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_nobody_listens_to_the_world_without_keys_unasked(host, tmp_path):
    with pytest.raises(RequestError, match="without a key"):
        Settings(host=host)
    assert not Settings(host=host, anonymous=True).local and not Settings(host=host, keys=tmp_path / "keys").local
    assert Settings(host="127.0.0.1").local and Settings(host="::1").local


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no model to serve"),
        (["m", "--host", "0.0.0.0"], "without a key"),
        (["m", "--policy", "lifo"], "unknown policy: 'lifo'; choices: fifo, shortest, deadline"),
        (["m", "--keys", "/nowhere/keys"], "no such folder"),
        (["--new-key", "a"], "a new key needs its file"),
        (["m", "--port", "0"], "a port lies between 1 and 65535: 0"),
    ],
)
def test_the_command_refuses_in_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)
    assert main(["serve", *(f"{tmp_path}/m" if flag == "m" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_taken_port_is_refused_before_anything_is_loaded(server):
    with pytest.raises(RequestError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        listen(Settings(port=server.port))


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    alice, bob = new_key(folder / "keys", "alice"), new_key(folder / "keys", "bob")
    limits = Limits(concurrent=1)
    with served(checkpoint("t2v"), folder=folder, key=alice, keys=folder / "keys", limits=limits) as running:
        yield running, {"Authorization": f"Bearer {bob}"}


def test_without_a_key_there_is_health_alone(guarded):
    running, _ = guarded
    assert running.http.get("/health", headers={"Authorization": ""}).status_code == 200
    for header in ("", "Bearer", "Bearer lw-guess", "Basic YTpi", "bearer " + "x" * 4000):
        for path in ("/v1/models", "/v1/videos", "/metrics", "/openapi.json", "/nothing"):
            answer = running.http.get(path, headers={"Authorization": header})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_one_keys_videos_are_not_anothers(guarded):
    running, bob = guarded
    video = running.post("/v1/videos", **SMALL, prompt="a fox", num_frames=5)
    running.openai.videos.poll(video["id"], poll_interval_ms=20)
    url = f"/v1/videos/{video['id']}"
    assert running.http.get(f"{url}/content").status_code == 200
    for path in (url, f"{url}/content", f"{url}/events"):
        assert running.http.get(path, headers=bob).status_code == 404
    assert running.http.post(f"{url}/cancel", headers=bob).status_code == 404
    assert running.http.delete(url, headers=bob).status_code == 404
    assert running.http.get("/v1/videos", headers=bob).json()["data"] == []
    image = running.post("/v1/images/generations", **SMALL, prompt="a fox", response_format="url")["data"][0]["url"]
    assert (running.http.get(image).status_code, running.http.get(image, headers=bob).status_code) == (200, 404)


def test_a_key_has_so_many_requests_under_way_and_another_its_own(guarded):
    running, bob = guarded
    body = SMALL | {"prompt": "a fox", "num_frames": 5, "num_inference_steps": 100}
    never = running.http.post("/v1/images/generations", json=SMALL | {"prompt": "a fox", "n": 2})
    assert never.status_code == 400 and "too many at once: 2; at most 1 here" in never.json()["error"]["message"]
    mine = running.http.post("/v1/videos", json=body).json()
    refused = running.http.post("/v1/videos", json=body)
    assert refused.status_code == 429 and "for this key: 1 of 1" in refused.json()["error"]["message"]
    his = running.http.post("/v1/videos", json=body, headers=bob).json()
    running.http.delete(f"/v1/videos/{mine['id']}")
    running.http.delete(f"/v1/videos/{his['id']}", headers=bob)
