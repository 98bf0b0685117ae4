"""Several models of one server; what each takes, and files where it takes them."""

import dataclasses
import io

import numpy as np
import pytest
from live import SMALL, served
from PIL import Image

import loopwright
from loopwright import media
from loopwright.errors import RequestError
from loopwright.request import Request
from loopwright.serving.bodies import Body, ImageBody, RolloutBody, VideoBody, frames_of
from loopwright.serving.lifecycle import by_name


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    sources = [checkpoint(kind) for kind in ("t2v", "i2v", "ti2v")]
    with served(*sources, folder=tmp_path_factory.mktemp("models")) as running:
        yield running


def name(server, kind: str) -> str:
    return next(name for name in server.service.models.named if name.startswith(f"{kind}-"))


def test_a_request_names_its_model_where_there_are_several(server):
    answer = server.http.post("/v1/videos", json={"prompt": "a fox"})
    assert answer.status_code == 404 and "no model named; choices: t2v-euler" in answer.json()["error"]["message"]
    assert len(server.openai.models.list().data) == 3


def test_models_run_side_by_side(server):
    videos = []
    for kind in ("t2v", "ti2v"):
        body = {**SMALL, "size": "64x64", "prompt": "a fox", "model": name(server, kind), "num_frames": 5}
        videos.append(server.post("/v1/videos", **body))
    done = [server.openai.videos.poll(video["id"], poll_interval_ms=30) for video in videos]
    assert [video.status for video in done] == ["completed"] * 2


def test_a_picture_is_moved_by_a_model_that_takes_one(server, model, tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    made = server.openai.videos.create_and_poll(
        model=name(server, "i2v"), prompt="a fox", size="32x32", input_reference=("fox.png", file.getvalue()),
        extra_body={**SMALL, "num_frames": 5, "mode": "exact"}, poll_interval_ms=30,
    )  # fmt: skip
    assert (made.status, made.parameters["task"]) == ("completed", "image_to_video")
    server.openai.videos.download_content(made.id).write_to_file(tmp_path / "fox.mp4")
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 32}
    alone = model("i2v").generate("a fox", image=picture, seed=3, **size).save(tmp_path / "alone.mp4")
    assert np.array_equal(media.read_video(tmp_path / "fox.mp4")[0], media.read_video(alone)[0])
    without = server.http.post("/v1/videos", json={**SMALL, "prompt": "a fox", "model": name(server, "i2v")})
    assert without.status_code == 400 and "image_to_video (image)" in without.json()["error"]["message"]


def test_a_video_is_made_of_another(server, tmp_path):
    path = tmp_path / "given.mp4"
    media.write(path, np.random.default_rng(0).integers(0, 256, (7, 40, 48, 3), np.uint8), fps=8, metadata={})
    form = {**{key: str(value) for key, value in SMALL.items()}, "prompt": "a fox", "model": name(server, "t2v")}
    video = server.http.post("/v1/videos", data=form, files={"input_reference": ("v.mp4", path.read_bytes())}).json()
    assert (video["parameters"]["task"], video["parameters"]["num_frames"]) == ("video_to_video", 5)
    assert server.openai.videos.poll(video["id"], poll_interval_ms=30).status == "completed"


def test_a_model_that_edits_no_images_says_what_it_does(server):
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    form = {"data": {"prompt": "a", "model": name(server, "i2v")}, "files": {"image": ("a.png", file.getvalue())}}
    answer = server.http.post("/v1/images/edits", **form)
    assert answer.status_code == 400 and "edits no images; its tasks: image_to_video" in answer.text


def test_every_parameter_of_a_request_can_be_asked_for():
    names = {field.name for field in dataclasses.fields(Request)} - {"image", "video"}
    assert names <= set(RolloutBody.model_fields)
    assert names - {"output"} <= set(VideoBody.model_fields)
    assert names - {"output", "task", "num_frames", "fps"} <= set(ImageBody.model_fields)


def test_a_size_is_width_and_height():
    body = Body(prompt="a", size="48x32")
    assert body.parameters() == {"width": 48, "height": 32}
    assert Body(prompt="a", size="auto").parameters() == {}


@pytest.mark.parametrize(("seconds", "frames"), [("1", 9), (0.01, 1), ("0.5", 5), (2, 17), ("1.125", 9)])
def test_seconds_become_the_nearest_number_of_frames_that_can_be_made(seconds, frames):
    card = loopwright.catalog.find("loopwright/tiny-wan")
    assert frames_of(seconds, card, 8) == frames


def test_two_models_of_one_name_are_refused(model):
    with pytest.raises(RequestError, match="two models have one name: 't2v-euler'"):
        by_name([model("t2v"), model("t2v")])
