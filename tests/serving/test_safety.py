"""What a filter refuses is not made, or not shown, and a filter that fails lets nothing pass."""

import json

import numpy as np
import pytest
from live import SMALL, served

from loopwright.errors import RequestError
from loopwright.serving.refusal import Refusal
from loopwright.serving.safety import Guard, load


class Filter:
    """Refuses what the tests tell it to."""

    bad_prompt, bad_frames, error, answer = "", "", False, None
    seen: list = []  # noqa: RUF012

    def prompt(self, text):
        if self.error:
            raise OSError("no model")
        return self.answer or ("it names a wolf" if "wolf" in text else None)

    def frames(self, frames):
        Filter.seen.append((frames.shape, frames.dtype))
        if self.error:
            raise OSError("no model")
        return Filter.bad_frames or None


def make() -> Filter:
    return Filter()


def nothing() -> str:
    return "no filter"


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("safety")
    with served(checkpoint("t2v"), folder=folder, safety=f"{__name__}:make") as running:
        yield running


@pytest.fixture
def server(guarded, monkeypatch):
    """The server, and a filter that refuses wolves alone until the test says otherwise."""
    for name, value in (("bad_frames", ""), ("error", False), ("answer", None)):
        monkeypatch.setattr(Filter, name, value)
    return guarded


IMAGE, VIDEO = SMALL | {"prompt": "a fox"}, SMALL | {"prompt": "a fox", "num_frames": 5}


def told(answer) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/videos"])
def test_a_prompt_is_refused_before_anything_is_queued(server, path):
    for extra in ({}, {"dry_run": True}):
        answer = server.http.post(path, json=SMALL | {"prompt": "a wolf"} | extra)
        assert told(answer) == (400, "prompt_refused", "the prompt is refused: it names a wolf")
        assert answer.json()["error"]["param"] == "prompt"
    assert server.http.get("/v1/videos").json()["data"] == []
    assert server.http.post("/v1/images/generations", json=IMAGE).status_code == 200


def test_an_image_that_may_not_be_shown_is_withheld_and_kept_nowhere(server, monkeypatch):
    monkeypatch.setattr(Filter, "bad_frames", "it shows a wolf")
    for form in ("b64_json", "url"):
        answer = server.http.post("/v1/images/generations", json=IMAGE | {"response_format": form})
        assert told(answer) == (400, "image_withheld", "what was made is withheld: it shows a wolf")
    assert not list(server.service.records.files.iterdir())


def test_a_streamed_image_and_its_previews_are_withheld(server, monkeypatch):
    monkeypatch.setattr(Filter, "bad_frames", "it shows a wolf")
    streamed = IMAGE | {"stream": True, "partial_images": 1, "num_inference_steps": 8}
    text = server.http.post("/v1/images/generations", json=streamed).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1]["error"]["code"] == "image_withheld" and "b64_json" not in text


def test_a_video_that_may_not_be_shown_has_failed_with_the_reason(server, monkeypatch):
    monkeypatch.setattr(Filter, "bad_frames", "it shows a wolf")
    video = server.openai.videos.poll(server.post("/v1/videos", **VIDEO)["id"], poll_interval_ms=20)
    assert (video.status, video.error.code) == ("failed", "image_withheld") and "a wolf" in video.error.message
    assert server.http.get(f"/v1/videos/{video.id}/content").status_code == 409
    assert not list(server.service.records.files.iterdir())
    assert Filter.seen[-1] == ((5, 32, 32, 3), np.uint8)


def test_a_preview_of_a_video_is_looked_at_too(server, monkeypatch):
    monkeypatch.setattr(Filter, "bad_frames", "it shows a wolf")
    video = server.post("/v1/videos", **VIDEO | {"num_inference_steps": 120})
    with server.http.stream("GET", f"/v1/videos/{video['id']}/events") as answer:
        next(line for line in answer.iter_lines() if '"denoise"' in line and '"step"' in line)
        assert told(server.http.get(f"/v1/videos/{video['id']}/preview"))[:2] == (400, "image_withheld")
    server.http.delete(f"/v1/videos/{video['id']}")


@pytest.mark.parametrize("broken", [{"error": True}, {"answer": True}])
def test_a_filter_that_fails_lets_nothing_pass(server, monkeypatch, broken):
    for name, value in broken.items():
        monkeypatch.setattr(Filter, name, value)
    answer = server.http.post("/v1/images/generations", json=IMAGE)
    assert told(answer)[:2] == (500, "safety_failed") and "no model" not in answer.text


def test_latents_are_not_given_where_there_is_a_filter(server):
    assert told(server.http.post("/rollout/generate", json=VIDEO))[:2] == (403, "not_allowed")


def test_pixels_of_which_a_filter_says_nothing_clear_do_not_pass():
    class Unclear(Filter):
        def frames(self, frames):
            return False

    with pytest.raises(Refusal, match="the safety filter failed"):
        Guard(Unclear()).frames(np.zeros((1, 8, 8, 3), np.uint8))
    Guard(None).frames(np.zeros((1, 8, 8, 3), np.uint8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nsfw", "a safety filter is named module:function: 'nsfw'; choices: opennsfw"),
        ("nowhere:make", "cannot make the safety filter .*No module named 'nowhere'"),
        (f"{__name__}:nobody", "cannot make the safety filter .*nobody"),
        (f"{__name__}:nothing", "a safety filter has the methods prompt and frames"),
    ],
)
def test_a_filter_that_is_none_is_refused(name, message):
    with pytest.raises(RequestError, match=message):
        load(name)


def test_open_nsfw_looks_at_frames_all_over_a_video(monkeypatch):
    safety = load("opennsfw")
    assert safety.prompt("anything") is None
    clean = np.zeros((40, 32, 32, 3), np.uint8)
    assert safety.frames(clean[:2]) is None
    scores = {0: 0.1, 39: 0.9}

    class Scored:
        threshold = 0.5

        def classify(self, frame):
            return type("Scored", (), {"nsfw": scores.get(int(frame[0, 0, 0]), 0.0)})

    monkeypatch.setattr(safety, "_classifier", Scored())
    numbered = np.arange(40, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    assert "score 0.90" in safety.frames(numbered) and safety.frames(numbered[:20]) is None
    scores[39] = float("nan")
    assert safety.frames(numbered) is not None
