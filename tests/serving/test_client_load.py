"""Five seconds of the load that benchmarks/serve_load.py lasts minutes of: the same clients, checks and comparisons."""

import asyncio
import os
import random
import threading
from collections import Counter

import pytest

import loopwright
import serve_load
from loopwright.engine.store import Store
from serve_clients import Crowd, Tally

# of a bounded size each, which how many requests came at once decides
POOLS = ("asyncio_", "encode_", "save_", "AnyIO worker thread")


def outside_pools() -> Counter[str]:
    """The names of all threads that no pool accounts for."""
    return Counter(thread.name for thread in threading.enumerate() if not thread.name.startswith(POOLS))


@pytest.fixture
def tally() -> Tally:
    return Tally()


def test_clients_of_every_kind_at_once_get_what_they_should_and_leave_nothing(
    server, tally, checkpoint, tmp_path, caplog
):
    threads = outside_pools()
    before, after = asyncio.run(
        serve_load.loaded(server.port, os.getpid(), tally, clients=20, seconds=4, warm=1, seed=1, kept=0.5, patience=2)
    )
    assert len(tally.seconds) > 15 and len(tally.samples) >= 2
    model = loopwright.load(checkpoint("t2v"), device="cpu", store=Store())
    wrong = serve_load.differing(model, tally.samples, tmp_path)
    problems = serve_load.judged(tally, before, after, wrong, caplog.text)
    ours = ("memory", "threads", "files")  # of this process, in which the clients are as well
    later = ("embeddings",)  # of prompts that nobody has sent in the one second before
    assert [problem for problem in problems if not problem.startswith(ours + later)] == []
    assert after.embeddings < 10 * max(before.embeddings, 2**15)
    assert not outside_pools() - threads and after.files <= before.files + 2
    assert not list(server.service.records.files.glob("*.job")) and not server.service.videos._following
    assert not server.service.videos._saver._kept and not server.service.videos._saver._moved


def test_what_should_not_be_is_found(server, tally, tmp_path, checkpoint):
    sample = serve_load.Sample({"prompt": "a fox", "num_inference_steps": 1, "height": 16, "width": 16, "num_frames": 1,
                                "seed": 1, "mode": "exact"}, ".png", b"other bytes")  # fmt: skip
    model = loopwright.load(checkpoint("t2v"), device="cpu", store=Store())
    assert serve_load.differing(model, [sample], tmp_path) == [sample]
    held = serve_load.Footprint(2**30, 10, 10, 0.0, 0.0, 100.0, 0.0)
    more = serve_load.Footprint(2**31, 11, 10, 1.0, 0.0, 100.0, 64.0)
    assert set(more.grown(held)) == {"memory", "threads", "under_way", "leased"} and not held.grown(held)
    tally.note("image", 500, 0.0, (200,), "broken")
    tally.note("image", 429, 0.0, (200,))
    problems = serve_load.judged(tally, held, held, [sample], "Traceback (most recent call last)")
    assert [problem.split(":")[0] for problem in problems] == [
        "1 times", "status 500", "other bytes than alone", "in the server's log",
    ]  # fmt: skip


def test_a_seed_repeats_the_load(server):
    def sent(seed: int) -> list[str]:
        async def some() -> list[str]:
            crowd = Crowd("127.0.0.1", server.port, Tally(), random.Random(seed))
            try:
                return [str(crowd._asked()) for _ in range(5)]
            finally:
                await crowd.close()

        return asyncio.run(some())

    assert sent(1) == sent(1) != sent(2)
