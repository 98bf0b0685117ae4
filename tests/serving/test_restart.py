"""A server is asked to end: the next one on its folder finishes every job, as if nothing had been."""

import signal
from collections.abc import Iterator

import httpx
import pytest
from live import SMALL, Running, served
from processes import Process, serving

import loopwright
from loopwright.engine.instance import Store

REQUESTS = [
    SMALL | {"prompt": "a fox", "seed": seed, "num_frames": 5, "num_inference_steps": steps, **mode}
    for seed, steps, mode in (
        (1, 3, {}),
        (2, 150, {}),
        (3, 20, {"mode": "exact"}),
        (4, 30, {"rows": 2}),
        (5, 3, {"mode": "throughput"}),
    )
]


@pytest.fixture
def process(checkpoint, tmp_path) -> Iterator[Process]:
    """A server on the test's folder."""
    with serving(checkpoint("t2v"), tmp_path) as started:
        yield started


def submit(http: httpx.Client) -> list[str]:
    return [http.post("/v1/videos", json=request).json()["id"] for request in REQUESTS]


def until_under_way(http: httpx.Client, video: str) -> None:
    """Until it has done some steps, and is far from done."""
    with http.stream("GET", f"/v1/videos/{video}/events") as answer:
        for line in answer.iter_lines():
            if '"denoise"' in line and '"step": 7' in line:
                return
    raise AssertionError("the video was done too soon")


def finish(running: Running, videos: list[str]) -> list[bytes]:
    done = [running.openai.videos.poll(video, poll_interval_ms=30) for video in videos]
    assert [video.status for video in done] == ["completed"] * len(videos), [video.error for video in done]
    assert sorted(video.id for video in running.openai.videos.list(limit=100)) == sorted(videos)
    files = running.service.records.files
    assert sorted(path.name for path in files.iterdir()) == sorted(f"{video}.mp4" for video in videos)
    return [running.http.get(f"/v1/videos/{video}/content").content for video in videos]


@pytest.fixture(scope="module")
def undisturbed(checkpoint, tmp_path_factory) -> list[bytes]:
    """The files of the requests, each run alone by a model of its own."""
    model, folder = loopwright.load(checkpoint("t2v"), device="cpu", store=Store()), tmp_path_factory.mktemp("alone")
    files = []
    for request in REQUESTS:
        given = {"mode": "fixed", "height": 32, "width": 32, **{k: v for k, v in request.items() if k != "size"}}
        rows = {"rows": 1} if given["mode"] == "fixed" and "rows" not in given else {}
        files.append(model.generate(**given, **rows).save(folder / f"{given['seed']}.mp4").read_bytes())
    return files


def first_step(running: Running, video: str) -> int:
    """The step of denoising that this server began the video with."""
    events = running.service.videos._tickets[video].events
    return next(event["step"] for event in events if event["type"] == "step" and event["stage"] == "denoise")


def test_asked_to_stop_a_server_saves_what_is_under_way_and_ends_cleanly(process, checkpoint, undisturbed, tmp_path):
    videos = submit(process.http)
    until_under_way(process.http, videos[1])
    image = SMALL | {"prompt": "a fox", "num_inference_steps": 40, "stream": True, "partial_images": 1}
    with (
        process.http.stream("GET", f"/v1/videos/{videos[1]}/events") as events,
        process.http.stream("POST", "/v1/images/generations", json=image | {"priority": "high"}) as waiting,
    ):
        lines = waiting.iter_lines()
        assert any("partial_image" in line for line in lines)
        process.process.send_signal(signal.SIGTERM)
        assert any("image_generation.completed" in line for line in lines)
        assert not any('"completed"' in line for line in events.iter_lines())
    assert process.process.wait(30) == 0
    with served(checkpoint("t2v"), folder=tmp_path) as running:
        assert finish(running, videos) == undisturbed
        assert first_step(running, videos[1]) >= 7


def test_a_folder_is_one_servers_alone(server, checkpoint):
    with (
        pytest.raises(loopwright.errors.StateError, match="is another server's"),
        served(checkpoint("t2v"), folder=server.service.settings.folder),
    ):
        pass
