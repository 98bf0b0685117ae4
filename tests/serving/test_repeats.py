"""Images asked for again under their Idempotency-Key: made once, answered alike."""

import asyncio
import threading

import httpx
import pytest
from live import SMALL, Running, served

from loopwright.serving.records import Records
from loopwright.serving.refusal import Refusal
from loopwright.serving.repeats import Keyed, Repeats

PATH = "/v1/images/generations"
IMAGE = {name: value for name, value in SMALL.items() if name != "seed"} | {"prompt": "a fox"}  # a seed is drawn


def ask(server: Running, key: str, body: dict = IMAGE) -> httpx.Response:
    return server.http.post(PATH, json=body, headers={"Idempotency-Key": key})


def test_the_same_request_gets_the_same_answer_also_after_a_restart(checkpoint, tmp_path):
    with served(checkpoint("t2v"), folder=tmp_path) as server:
        first, other = ask(server, "a"), ask(server, "b")
        assert ask(server, "a").content == first.content and first.json()["seed"] != other.json()["seed"]
        assert server.openai.images.generate(
            prompt="a fox", size="32x32", extra_body={"num_inference_steps": 3, "max_sequence_length": 32},
            extra_headers={"Idempotency-Key": "a"},
        ).data[0].b64_json == first.json()["data"][0]["b64_json"]  # fmt: skip
    with served(checkpoint("t2v"), folder=tmp_path) as server:
        assert ask(server, "a").content == first.content
        assert server.http.get("/v1/videos").json()["data"] == []


def test_who_asks_meanwhile_waits_for_the_same_answer(server):
    name = next(iter(server.service.models.named))
    made = server.service.metrics.jobs.labels(name, "done")
    before, answers = made._value.get(), []
    body = IMAGE | {"num_inference_steps": 30}
    threads = [threading.Thread(target=lambda: answers.append(ask(server, "together", body))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.content for answer in answers}) == 1 and answers[0].status_code == 200
    assert made._value.get() == before + 1 and len(server.service.admission) == 0


def test_a_key_is_of_one_request(server):
    assert ask(server, "one").status_code == 200
    for body in (IMAGE | {"prompt": "a wolf"}, IMAGE | {"n": 2}):
        refused = ask(server, "one", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert ask(server, "one", IMAGE | {"stream": True}).status_code == 400
    assert ask(server, "x" * 256).status_code == 400


def test_what_failed_may_be_asked_for_again(server, monkeypatch):
    async def broken(*_: object) -> None:
        raise Refusal("not today", status=422)

    with monkeypatch.context() as patch:
        patch.setattr(server.service.images, "make", broken)
        assert ask(server, "failed").status_code == 422
    assert ask(server, "failed").status_code == 200


@pytest.fixture
def repeats(tmp_path):
    records = Records(tmp_path)
    yield Repeats(records)
    records.close()


def test_an_answer_is_made_as_long_as_anybody_waits_for_it(repeats):
    asked = Keyed("alice", "key", "hash", "model")

    async def run() -> None:
        going, ended = asyncio.Event(), []

        async def make() -> bytes:
            try:
                await going.wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return b"made"

        one, two = (asyncio.create_task(repeats.once(asked, make)) for _ in range(2))
        await asyncio.sleep(0.1)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        assert not two.done() and not ended
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        await asyncio.sleep(0)
        assert ended == ["cancelled"]
        again = asyncio.create_task(repeats.once(asked, make))
        await asyncio.sleep(0.05)
        going.set()
        assert await again == b"made" and await repeats.once(asked, make) == b"made"
        with pytest.raises(Refusal, match="has made another request"):
            await repeats.once(Keyed("alice", "key", "other", "model"), make)

    asyncio.run(run())
