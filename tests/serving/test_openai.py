"""OpenAI's own client, unmodified, against a real server."""

import base64
import io

import numpy as np
import openai
import pytest
from live import SMALL
from PIL import Image

from loopwright.media import read_metadata

EXTRA = {name: value for name, value in SMALL.items() if name != "size"}


def pixels(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_models_are_listed_and_found(server):
    (listed,) = server.openai.models.list()
    assert listed.id == server.openai.models.retrieve(listed.id).id
    height = listed.parameters["text_to_video"]["properties"]["height"]
    assert height["multipleOf"] == 16 and height["type"] == "integer"
    with pytest.raises(openai.NotFoundError, match="no such model: 'sora-2'; choices"):
        server.openai.models.retrieve("sora-2")


def test_images_are_made_each_with_its_seed(server):
    made = server.openai.images.generate(prompt="a fox", n=2, size="32x32", extra_body=EXTRA)
    assert [pixels(image.b64_json).shape for image in made.data] == [(32, 32, 3)] * 2
    assert [image.seed for image in made.data] == [3, 4]
    assert not np.array_equal(*(pixels(image.b64_json) for image in made.data))
    assert (made.mode, made.rows, made.seed, made.parameters["num_inference_steps"]) == ("fixed", 1, 3, 3)
    assert made.weights == {"transformer": 1} and len(made.card) == 16


def test_an_image_streams_what_it_will_be_before_it_is(server):
    events = list(
        server.openai.images.generate(prompt="a fox", size="32x32", stream=True, partial_images=2, extra_body=EXTRA)
    )
    assert [event.type for event in events] == [
        *["image_generation.partial_image"] * 2,
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    whole = server.openai.images.generate(prompt="a fox", size="32x32", extra_body=EXTRA).data[0]
    assert events[-1].b64_json == whole.b64_json
    assert pixels(events[0].b64_json).shape == (32, 32, 3)
    assert not np.array_equal(pixels(events[0].b64_json), pixels(events[-1].b64_json))


def test_an_image_by_url_is_kept(server):
    made = server.openai.images.generate(prompt="a fox", size="32x32", response_format="url", extra_body=EXTRA).data[0]
    content = server.http.get(made.url)
    whole = server.openai.images.generate(prompt="a fox", size="32x32", extra_body=EXTRA).data[0]
    assert content.headers["content-type"] == "image/png" and content.content == base64.b64decode(whole.b64_json)


def test_an_image_is_edited(server):
    drawn = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(drawn, "PNG")
    edits = [
        server.openai.images.edit(
            image=("red.png", drawn.getvalue()), prompt="a fox", size="32x32", extra_body=EXTRA | {"strength": strength}
        )
        for strength in (0.4, 0.9)
    ]
    assert edits[0].parameters["task"] == "video_to_video"
    assert pixels(edits[0].data[0].b64_json).shape == (32, 32, 3)
    assert edits[0].data[0].b64_json != edits[1].data[0].b64_json


def test_a_video_is_made_polled_downloaded_and_deleted(server, tmp_path):
    made = server.openai.videos.create_and_poll(
        prompt="a fox", seconds="1", size="32x32", extra_body={**EXTRA, "fps": 8}, poll_interval_ms=50
    )
    assert (made.status, made.progress, made.seconds, made.size) == ("completed", 100, "1.125", "32x32")
    server.openai.videos.download_content(made.id).write_to_file(tmp_path / "fox.mp4")
    assert read_metadata(tmp_path / "fox.mp4")["request"]["num_frames"] == 9
    assert made.id in [video.id for video in server.openai.videos.list(limit=5)]
    assert server.openai.videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        server.openai.videos.retrieve(made.id)
