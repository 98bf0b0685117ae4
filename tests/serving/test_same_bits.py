"""What a server under load answers is what the command line makes: the same bytes, files and their records included."""

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live import SMALL
from safetensors.torch import load as load_tensors

from loopwright.cli import main

MODES = {"exact": {"mode": "exact"}, "fixed": {"mode": "fixed"}, "fixed in threes": {"mode": "fixed", "rows": 3}}
FLAGS = ("--height", "32", "--width", "32", "--num-inference-steps", "3", "--max-sequence-length", "32",
         "--device", "cpu")  # fmt: skip


@pytest.fixture
def generate(checkpoint, tmp_path, monkeypatch):
    """`generate(seed, mode, frames)`: the file that the command line writes."""
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)

    def run(seed: int, mode: dict[str, object], frames: int) -> bytes:
        rows = () if mode["mode"] == "exact" else ("--rows", str(mode.get("rows", 1)))
        path = tmp_path / f"{seed}.{'png' if frames == 1 else 'mp4'}"
        flags = ("--seed", str(seed), "--mode", str(mode["mode"]), *rows, "--num-frames", str(frames))
        where = ("--output-path", str(path), "--quiet")
        assert main(["generate", str(checkpoint("t2v")), "--prompt", "a fox", *FLAGS, *flags, *where]) == 0
        return Path(path).read_bytes()

    return run


@pytest.mark.parametrize("mode", MODES)
def test_images_of_many_clients_at_once_equal_the_command_lines(server, generate, mode):
    def ask(seed: int) -> bytes:
        body = {**SMALL, **MODES[mode], "prompt": "a fox", "seed": seed}
        return base64.b64decode(server.post("/v1/images/generations", **body)["data"][0]["b64_json"])

    with ThreadPoolExecutor(5) as clients:
        answers = list(clients.map(ask, range(5)))
    assert answers == [generate(seed, MODES[mode], 1) for seed in range(5)]


def test_videos_made_side_by_side_equal_the_command_lines(server, generate):
    seeds = (5, 6)
    made = [server.post("/v1/videos", **SMALL | {"seed": seed}, prompt="a fox", num_frames=5) for seed in seeds]
    for seed, video in zip(seeds, made, strict=True):
        done = server.openai.videos.poll(video["id"], poll_interval_ms=30)
        assert (done.status, done.seed, done.rows) == ("completed", seed, 1)
        content = server.http.get(f"/v1/videos/{video['id']}/content")
        assert content.content == generate(seed, MODES["fixed"], 5)
        part = server.http.get(f"/v1/videos/{video['id']}/content", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content.content[10:20])


def test_throughput_mode_is_asked_for_by_name(server):
    made = server.post("/v1/images/generations", prompt="a fox", mode="throughput", **SMALL)
    assert (made["mode"], made["rows"]) == ("throughput", 1)


def test_a_rollout_carries_its_trajectory(server, model):
    answer = server.http.post("/rollout/generate", json={"prompt": "a fox", "num_frames": 5, "mode": "exact", **SMALL})
    tensors = load_tensors(answer.content)
    alone = model("t2v").generate("a fox", height=32, width=32, num_frames=5, num_inference_steps=3, seed=3,
                                  max_sequence_length=32, output="latents").latents  # fmt: skip
    assert tensors["trajectory"].shape == (4, *alone.shape[1:]) and tensors["timesteps"].shape == (3,)
    assert tensors["latents"].equal(alone) and tensors["trajectory"][-1:].equal(alone)
    assert set(tensors) == {"latents", "trajectory", "timesteps"}
