"""Lines of the log: for people, or an object each; what a request started is told under its id."""

import io
import json
import logging
import time

import pytest
from live import SMALL

from loopwright.errors import RequestError
from loopwright.serving.logs import FIELDS, JsonLines, TextLines, about
from loopwright.serving.settings import Settings


@pytest.fixture
def lines(server):
    """`lines(formatter)`: what the server writes from now on, in that form."""
    logger, written, handlers = logging.getLogger("loopwright.serving"), io.StringIO(), []
    logger.setLevel(logging.INFO)

    def start(form: logging.Formatter) -> io.StringIO:
        handlers.append(logging.StreamHandler(written))
        handlers[-1].setFormatter(form)
        logger.addHandler(handlers[-1])
        return written

    yield start
    for handler in handlers:
        logger.removeHandler(handler)


def first(written: io.StringIO) -> str:
    """What is written once the answer has been sent."""
    until = time.monotonic() + 10
    while not written.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    return written.getvalue()


def test_a_request_is_an_object_with_its_id(server, lines):
    written = lines(JsonLines())
    server.http.get("/v1/videos/x?secret=1", headers={"X-Request-ID": "here"})
    line = json.loads(first(written))
    told = {"request_id": "here", "method": "GET", "path": "/v1/videos/x", "status": 404, "owner": "anybody"}
    assert told.items() <= line.items() and line["level"] == "info" and line["at"] > 1e9
    assert "trace_id" not in line and "secret" not in written.getvalue()


def test_a_line_for_people_names_the_request_too(server, lines):
    written = lines(TextLines())
    server.http.get("/v1/videos/x%0Afake", headers={"X-Request-ID": "here"})
    (line,) = first(written).splitlines()
    assert " info GET '/v1/videos/x" in line and " 404 in " in line and line.endswith("[here]")


def test_what_fails_after_the_answer_is_told_under_the_request_that_asked_for_it(server, lines, monkeypatch):
    written = lines(JsonLines())

    async def broken(*_: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.jobs, "encode", broken)
        body = SMALL | {"prompt": "a fox", "num_frames": 5}
        video = server.http.post("/v1/videos", json=body, headers={"X-Request-ID": "asked"}).json()
        assert server.openai.videos.poll(video["id"], poll_interval_ms=20).status == "failed"
    (line,) = [line for line in map(json.loads, written.getvalue().splitlines()) if line["level"] == "error"]
    assert line["request_id"] == "asked" and "KeyError: 'a bug'" in line["error"] and video["id"] in line["message"]


def test_a_traceback_is_part_of_its_line():
    record = logging.LogRecord("x", logging.ERROR, "", 0, "two\nlines", (), None)
    setattr(record, FIELDS, {"n": 1})
    with about("here"):
        assert json.loads(JsonLines().format(record)).items() >= {"message": "two\nlines", "n": 1}.items()
        assert "\n" not in JsonLines().format(record)
    assert "request_id" not in json.loads(JsonLines().format(record))


def test_a_form_nobody_knows_is_refused():
    with pytest.raises(RequestError, match="unknown format of the log: 'xml'; choices: text, json"):
        Settings(log_format="xml")
