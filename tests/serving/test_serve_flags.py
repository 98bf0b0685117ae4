"""What `serve` is told of its models, as its clients see it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import tiny
from loopwright.cli import flags as flags_of
from loopwright.cli import main, parser, serve
from loopwright.serving.app import create_app
from loopwright.serving.refusal import Refusal
from loopwright.serving.settings import Limits
from lora_files import written

SMALL = {"prompt": "a fox", "size": "32x32", "num_inference_steps": 2, "seed": 3, "num_frames": 5}


@pytest.fixture
def told(checkpoint, tmp_path, monkeypatch):
    """`told(*flags)`: the listing and a video's parameters, as a server with those flags tells them."""
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)

    def run(*flags: str) -> tuple[dict, dict]:
        answers = []

        def asked(service, sock) -> None:
            with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
                answers.append(client.get("/v1/models").json()["data"][0])
                answers.append(client.post("/v1/videos", json=SMALL | {"dry_run": True}).json())

        monkeypatch.setattr("loopwright.serving.server.run", asked)
        assert main(["serve", str(checkpoint("t2v")), "--folder", str(tmp_path), "--device", "cpu", *flags]) == 0
        return answers[0], answers[1]

    return run


def test_sampler_and_adapters_are_told_with_every_answer(told, checkpoint, tmp_path):
    file = written(tmp_path / "a.safetensors", tiny.reference(checkpoint("t2v"), "t2v").transformer)
    listed, answer = told("--sampler", "unipc", "--lora", f"{file}:0.5")
    for each in (listed, answer):
        assert (each["sampler"], each["revision"]) == ("unipc", None)
        (adapter,) = each["lora"]
        assert (adapter["component"], adapter["scale"]) == ("transformer", 0.5)
        assert re.fullmatch("[0-9a-f]+", adapter["digest"])
    plain, _ = told("--port", "8001")
    assert (plain["sampler"], plain["lora"]) == ("euler", [])
    assert plain["card"] != listed["card"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sampler", "heun"), "unknown sampler: 'heun'; choices: euler, unipc"),
        (("--revision", "v1"), "a local folder has no revisions: 'v1'"),
        (("--lora", "nowhere.safetensors"), "nowhere.safetensors"),
        (("{folder}", "--lora", "a.safetensors"), "--lora is of one model, and several are named"),
        (("--tls-cert", "cert.pem"), "--tls-cert needs its other half; give --tls-key too, or neither"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags, message, checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)
    folder = str(checkpoint("t2v"))
    assert main(["serve", folder, *(flag.format(folder=folder) for flag in flags), "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_flags_and_a_file_say_how_a_server_is_run(tmp_path):
    (tmp_path / "serve.yaml").write_text(f"model-root: [{tmp_path}]\nwebhook_host: [a.example, 'b.example:8443']\n")
    flags = ["--keys", "k", "--manager", "alice", "--manager", "bob", "--idle-evict", "1.5", "--log-format", "json",
             "--webhook-secret", "s", "--webhook-private", "--safety", "opennsfw"]  # fmt: skip
    arguments = parser().parse_args(["serve", "m", *flags])
    flags_of.fill(arguments, flags_of.read_config(str(tmp_path / "serve.yaml"), serve.FLAGS), serve.FLAGS)
    told = serve._settings(arguments)
    assert (told.managers, told.model_roots, told.idle_seconds) == (("alice", "bob"), (tmp_path,), 90.0)
    assert (told.webhook_hosts, told.webhook_secret) == (("a.example", "b.example:8443"), Path("s").absolute())
    assert (told.webhook_private, told.safety, told.log_format) == (True, "opennsfw", "json")


def test_a_schema_names_what_runs_here_and_can_be_made(server):
    (listed,) = server.http.get("/v1/models").json()["data"]
    properties = listed["parameters"]["text_to_video"]["properties"]

    def taken(name: str, values: tuple) -> list:
        asked = {value: SMALL | {name: value, "dry_run": True} for value in values}
        return [value for value, body in asked.items() if server.http.post("/v1/videos", json=body).status_code == 200]

    attention, kernels, frames = properties["attention"], properties["kernels"], properties["num_frames"]
    assert attention["enum"] == taken("attention", ("sdpa", "math", "flash", "cudnn", "fa3"))
    assert kernels["enum"] == taken("kernels", ("plain", "fused"))
    assert (attention["default"], kernels["default"]) == ("sdpa", "plain")
    made = taken("num_frames", tuple(range(1, 12)))
    assert made == list(range(frames["minimum"], 12, frames["x-step"]))


def test_a_schema_leaves_out_what_means_nothing_to_the_task_or_the_sampler(server):
    (listed,) = server.http.get("/v1/models").json()["data"]
    properties = listed["parameters"]["text_to_video"]["properties"]
    for name, value in (("guidance_scale_2", 3.0), ("noise_level", 0.5), ("noise_start", 0), ("noise_steps", 1)):
        refused = server.http.post("/v1/videos", json=SMALL | {"prompt": "a", name: value, "dry_run": True})
        assert refused.status_code == 400 and name not in properties
    assert "strength" not in properties
    edited = listed["parameters"].get("video_to_video", {"properties": {"strength": {}}})
    assert "strength" in edited["properties"]


def test_numbers_without_end_are_refused_before_they_make_infinity(model):
    request = model("t2v").request("a fox", height=32, width=32, num_frames=1)
    for name in ("guidance_scale", "guidance_scale_2", "flow_shift", "noise_level"):
        with pytest.raises(Refusal, match=f"{name} is too large here: 1e[+]30; at most 1000.0"):
            Limits().check(replace(request, **{name: 1e30}))
