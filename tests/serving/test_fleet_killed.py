"""Replicas as processes that Ray has placed: one is killed, and another finishes what it had, with the same bytes."""

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live import SMALL, free_port

import loopwright
from loopwright.engine.store import Store

pytestmark = pytest.mark.slow
GIVEN = {"height": 32, "width": 32, "num_inference_steps": 120, "max_sequence_length": 32, "mode": "fixed", "rows": 1}


class Served:
    """`loopwright serve --replicas 2` in a process of its own."""

    def __init__(self, source: Path, folder: Path) -> None:
        port, path = free_port(), str(Path(loopwright.__file__).parents[1])
        command = [sys.executable, "-m", "loopwright", "serve", str(source), "--replicas", "2", "--port", str(port)]
        flags = ["--folder", str(folder), "--device", "cpu", "--threads", "1"]
        self.process = subprocess.Popen([*command, *flags], env={**os.environ, "PYTHONPATH": path},
                                        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        self.lines: list[str] = []

    def wait(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("serving "):
                threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()
                return
        raise AssertionError("".join(self.lines))

    def replicas(self) -> list[int]:
        """The processes of the replicas."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if is_replica(child)]


def is_replica(process: psutil.Process) -> bool:
    try:
        listens = any(c.status == psutil.CONN_LISTEN and c.laddr.ip == "127.0.0.1" for c in process.net_connections())
        return listens and "ray::Process" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


@pytest.fixture
def served(checkpoint, tmp_path) -> Iterator[Served]:
    started = Served(checkpoint("t2v"), tmp_path / "fleet")
    try:
        started.wait()
        yield started
    finally:
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(60)
        started.http.close()


def until(true, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def test_killed_in_the_middle_a_replica_leaves_its_jobs_to_another(served, checkpoint, tmp_path):
    usual = {name: value for name, value in SMALL.items() if name != "seed"} | {"prompt": "a fox"}
    body = usual | {"num_frames": 5, "num_inference_steps": 120}
    made = [served.http.post("/v1/videos", json=body | {"seed": seed}).json()["id"] for seed in range(8)]
    images: dict[int, httpx.Response] = {}

    def image(seed: int) -> None:
        asked = usual | {"seed": seed, "priority": "high", "num_inference_steps": 120}
        images[seed] = served.http.post("/v1/images/generations", json=asked)

    waiting = [threading.Thread(target=image, args=(seed,)) for seed in range(4)]
    for thread in waiting:
        thread.start()
    folders = sorted((tmp_path / "fleet").iterdir())
    assert [folder.name for folder in folders] == ["replica-0", "replica-1"]
    until(lambda: all(any(folder.glob("files/*.job")) for folder in folders))
    processes = served.replicas()
    assert len(processes) == 2
    time.sleep(0.3)
    os.kill(processes[0], signal.SIGKILL)
    for thread in waiting:
        thread.join()

    def done(video: str) -> bool:
        answer = served.http.get(f"/v1/videos/{video}").json()
        assert answer["status"] in ("queued", "in_progress", "completed"), answer
        return answer["status"] == "completed"

    until(lambda: all(done(video) for video in made))
    listed = served.http.get("/v1/videos?limit=100").json()["data"]
    assert sorted(video["id"] for video in listed) == sorted(made)
    until(lambda: [one["status"] for one in served.http.get("/health").json()["replicas"]] == ["ok", "ok"])
    model = loopwright.load(checkpoint("t2v"), device="cpu", store=Store())
    for seed, video in enumerate(made):
        alone = model.generate("a fox", seed=seed, num_frames=5, **GIVEN).save(tmp_path / "alone.mp4")
        assert served.http.get(f"/v1/videos/{video}/content").content == alone.read_bytes()
    for seed, answer in images.items():
        alone = model.generate("a fox", seed=seed, num_frames=1, **GIVEN).save(tmp_path / "alone.png")
        assert base64.b64decode(answer.json()["data"][0]["b64_json"]) == alone.read_bytes()


def test_hung_up_on_a_fleet_renews_its_replicas_while_it_serves(served):
    before, answers = set(served.replicas()), []
    served.process.send_signal(signal.SIGHUP)

    def renewed() -> bool:
        answers.append(served.http.post("/v1/images/generations", json=SMALL | {"prompt": "a fox"}).status_code)
        return len(served.replicas()) == 2 and not before & set(served.replicas())

    until(renewed)
    assert set(answers) == {200} and len(answers) > 2
