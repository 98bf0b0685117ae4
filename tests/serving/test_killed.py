"""A server is killed in the middle of jobs: the next one finishes each once, with the bytes of an undisturbed run."""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from live import SMALL, Running, served
from processes import Process, count_steps, serving, steps_of

import loopwright
from loopwright.engine.instance import Store
from loopwright.engine.job import Job

MODES = ({}, {"rows": 4}, {"mode": "exact"}, {"rows": 4}, {"rows": 2, "num_frames": 9}, {"rows": 4})


def requests(count: int, steps: int) -> list[dict[str, object]]:
    """Some alone, some that share their calls, of two lengths."""
    usual = SMALL | {"prompt": "a fox", "num_frames": 5}
    return [
        usual | {"seed": seed, "num_inference_steps": steps + seed % 3} | MODES[seed % len(MODES)]
        for seed in range(count)
    ]


def alone(checkpoint: Path, requests: list[dict[str, object]], folder: Path) -> list[bytes]:
    """The file of each, made by a model of its own process with nobody beside it."""
    model, files = loopwright.load(checkpoint, device="cpu", store=Store()), []
    for request in requests:
        size = {"mode": "fixed", "height": 32, "width": 32}
        given = size | {name: value for name, value in request.items() if name != "size"}
        rows = {"rows": 1} if given["mode"] == "fixed" and "rows" not in given else {}
        files.append(model.generate(**given, **rows).save(folder / f"{given['seed']}.mp4").read_bytes())
    return files


def kill(process: Process, steps: int) -> Counter[tuple[int, int, int]]:
    """End the server at once, when so many steps have been taken in all; those that had been."""
    deadline = time.monotonic() + 120
    while process.steps.total() < steps:
        assert time.monotonic() < deadline and process.process.poll() is None
        time.sleep(0.002)
    process.process.send_signal(signal.SIGKILL)
    assert process.process.wait() == -signal.SIGKILL
    return process.steps


def finish(running: Running, videos: list[str]) -> list[bytes]:
    """The files of all videos; there are no others."""
    done = [running.openai.videos.poll(video, poll_interval_ms=50) for video in videos]
    assert [video.status for video in done] == ["completed"] * len(videos), [video.error for video in done]
    assert sorted(video.id for video in running.openai.videos.list(limit=100)) == sorted(videos)
    return [running.http.get(f"/v1/videos/{video}/content").content for video in videos]


def check(before: Counter[tuple[int, int, int]], after: Counter[tuple[int, int, int]], wanted: dict[int, int]) -> int:
    """No step is missing, and of no job more than one was taken twice. How many were."""
    both = before + after
    for seed, steps in wanted.items():
        taken = sorted(place for place in both if place[0] == seed)
        stages = {stage: [index for _, at, index in taken if at == stage] for _, stage, _ in taken}
        assert all(indices == list(range(1, len(indices) + 1)) for indices in stages.values()), stages
        assert len(stages) == 3 and steps in map(len, stages.values())
        assert sum(both[place] - 1 for place in taken) <= 1, [place for place in taken if both[place] > 1]
    assert set(both) == {place for place in both if place[0] in wanted}
    return both.total() - len(both)


def killed_in_the_middle(checkpoint, folder: Path, monkeypatch, count: int, steps: int, share: float) -> None:
    asked = requests(count, steps)
    with serving(checkpoint, folder) as process:
        videos = [process.http.post("/v1/videos", json=request).json()["id"] for request in asked]
        before = kill(process, round(share * count * steps))
    unfinished = count - sum((folder / "files" / f"{video}.mp4").exists() for video in videos)
    assert unfinished > count / 4
    monkeypatch.setattr(Job, "advance", Job.advance)  # what is put in its place ends with the test
    count_steps(folder / "after.log")
    with served(checkpoint, folder=folder) as running:
        made = finish(running, videos)
    again = check(before, steps_of(folder / "after.log"), {one["seed"]: one["num_inference_steps"] for one in asked})
    print(f"{count} jobs, {unfinished} unfinished after {before.total()} steps; taken twice: {again}")
    (folder / "alone").mkdir()
    assert made == alone(checkpoint, asked, folder / "alone")


def test_killed_in_the_middle_of_jobs_the_next_server_finishes_each_once(checkpoint, tmp_path, monkeypatch):
    killed_in_the_middle(checkpoint("t2v", "unipc"), tmp_path, monkeypatch, count=6, steps=15, share=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_in_the_middle_of_twenty_jobs_the_next_server_finishes_each_once(
    checkpoint, tmp_path, monkeypatch, seed
):
    share = random.Random(seed).uniform(0.15, 0.7)
    killed_in_the_middle(checkpoint("t2v", "unipc"), tmp_path, monkeypatch, count=20, steps=40, share=share)
