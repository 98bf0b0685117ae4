"""Previews of videos under way: like what they become, and of no influence on it."""

import io
import time

import numpy as np
import pytest
from live import served
from PIL import Image

from loopwright.media import read_video

ASKED = {"prompt": "a fox moving left on a blue background", "seed": 7, "num_frames": 5, "num_inference_steps": 16}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served("loopwright/tiny-wan", folder=tmp_path_factory.mktemp("glimpse")) as running:
        yield running


def test_a_preview_is_like_the_first_frame_and_changes_nothing_of_the_video(server, tmp_path):
    paths, seen = [], []
    for watched in (False, True):
        video = server.post("/v1/videos", **ASKED)
        address = f"/v1/videos/{video['id']}"
        while server.http.get(address).json()["status"] in ("queued", "in_progress"):
            if watched and (answer := server.http.get(f"{address}/preview")).status_code == 200:
                seen.append(np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB"), np.float32))
            time.sleep(0.02)
        path = tmp_path / f"{watched}.mp4"
        path.write_bytes(server.http.get(f"{address}/content").content)
        paths.append(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    final = np.asarray(read_video(paths[0])[0], np.float32)[0]
    far = [float(np.abs(picture - final).mean()) for picture in seen]
    assert len(far) >= 2 and far[-1] < 25 and far[-1] < far[0]


def test_there_is_no_preview_of_what_has_ended_or_of_what_is_not_there(server):
    done = server.openai.videos.create_and_poll(
        prompt="a fox", extra_body={"num_frames": 1, "num_inference_steps": 1}, poll_interval_ms=30
    )
    ended = server.http.get(f"/v1/videos/{done.id}/preview")
    assert ended.status_code == 409 and ended.json()["error"]["code"] == "no_preview"
    assert server.http.get("/v1/videos/video_none/preview").status_code == 404
