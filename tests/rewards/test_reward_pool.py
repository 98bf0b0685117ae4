"""Real processes that hang, throw, die and answer nonsense: whoever is scored beside them keeps his score."""

import os
import signal
import socket
import time

import numpy as np
import pytest

from lettered import sample
from loopwright.errors import RequestError
from loopwright.rewards import Sample, parse
from loopwright.rewards.pipe import receive, send
from loopwright.rewards.pool import Pool

SCORER = """
import os, signal, time

def moody(samples):
    for each in samples:
        if each.prompt == "hangs":
            time.sleep(600)
        if each.prompt == "throws":
            raise ValueError("of no use")
        if each.prompt == "dies":
            os._exit(3)
    if any(each.prompt == "nonsense" for each in samples):
        return [0.0]
    return [float(each.frames.float().mean()) for each in samples]

class Where:
    def __init__(self, where: str):
        self.where = where

    def __call__(self, samples):
        for each in samples:
            with open(os.path.join(self.where, each.prompt), "a") as file:
                print(os.getpid(), file=file)
        time.sleep(0.05)
        return [float(os.getpid())] * len(samples)

class Alone:
    def __call__(self, samples):
        return [float(len(samples))] * len(samples)

class Broken:
    def __init__(self):
        os._exit(5)

def stutters(samples):
    # the first bytes of an answer, wherever that goes, and no more
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), bytes(3))
        except OSError:
            pass
    os.kill(os.getpid(), signal.SIGSTOP)

class Fragile:
    # dies once, and cannot begin while the mark is there that it leaves
    def __init__(self, mark: str):
        self.mark = mark
        if os.path.exists(mark):
            os._exit(6)

    def __call__(self, samples):
        if any(each.prompt == "dies once" for each in samples) and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(3)
        time.sleep(0.02)
        return [float(each.frames.float().mean()) for each in samples]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("scorer") / "scorer.py"
    path.write_text(SCORER)
    return str(path)


def asked(prompts: list[str]) -> list[Sample]:
    return [sample(prompt, np.full((2, 2, 3), place, np.uint8)) for place, prompt in enumerate(prompts)]


def test_nobody_loses_a_score_to_one_who_hangs_throws_or_dies(file):
    prompts = ["fine"] * 40
    prompts[5], prompts[17], prompts[30] = "hangs", "throws", "dies"
    pool = Pool(f"{file}:moody", workers=2, timeout=1.0)
    try:
        scores = pool(asked(prompts))
        assert scores == [None if prompt != "fine" else float(place) for place, prompt in enumerate(prompts)]
        reasons = {"no answer in time": 1, "ValueError: of no use": 1, "its process ended with status 3": 1}
        assert pool.failures == reasons
        assert pool(asked(["fine"] * 40)) == [float(place) for place in range(40)], "the pool is whole again"
        assert pool(asked(["nonsense", "fine"])) == [0.0, 1.0], "one score was right for one sample"
    finally:
        pool.close()


def test_as_many_processes_as_workers_share_the_samples_and_end_with_the_pool(file, tmp_path):
    pool = Pool(f"{file}:Where", {"where": str(tmp_path)}, workers=2)
    found = pool(asked([f"p{n}" for n in range(64)]))
    assert len(set(found)) == 2 and os.getpid() not in found
    assert all(len(each.read_text().split()) == 1 for each in tmp_path.iterdir()), "nobody was scored twice"
    pool.close()
    until = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{int(pid)}") for pid in set(found)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{int(pid)}") for pid in set(found))


def test_a_pool_that_cannot_begin_says_why(file):
    for name, parameters, told in (
        ("beauty", {}, "choices: ocr"),
        ("jpeg", {"quality": 99}, "1 to 95"),
        (f"{file}:Broken", {}, "status 5"),
    ):
        with pytest.raises(RequestError, match=told):
            Pool(name, parameters, workers=1)


def test_a_worker_that_takes_nothing_or_half_answers_is_replaced_as_a_silent_one_is(file, tmp_path):
    large = [sample(f"large {n}", np.zeros((1200, 1200, 3), np.uint8)) for n in range(2)]  # more than sockets hold
    pool = Pool(f"{file}:Where", {"where": str(tmp_path)}, workers=1, timeout=1.0)
    try:
        (first,) = pool(large[:1])
        os.kill(int(first), signal.SIGSTOP)
        found = pool(large)
        assert None not in found and first not in found and pool.failures == {}
    finally:
        pool.close()
    pool = Pool(f"{file}:stutters", workers=1, timeout=0.5)
    try:
        assert pool(asked(["a"])) == [None] and pool.failures == {"no answer in time": 1}
    finally:
        pool.close()


def test_the_time_is_that_of_a_whole_message():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs, {"a": [1, b"x" * 1000]})
        assert receive(ours) == {"a": [1, b"x" * 1000]}
        theirs.sendall(bytes(7) + b"\x05" + b"half")
        with pytest.raises(TimeoutError):
            receive(ours, time.monotonic() + 0.1)
        with pytest.raises(TimeoutError):
            send(ours, bytes(2**24), time.monotonic() + 0.1)
        with pytest.raises(TimeoutError):
            receive(ours, time.monotonic() - 1)
        theirs.close()
        with pytest.raises((EOFError, OSError)):
            receive(ours)


def test_a_worker_that_cannot_be_replaced_leaves_its_work_to_the_others_and_is_tried_at_the_next_call(file, tmp_path):
    prompts, told = ["dies once", *["fine"] * 39], "a scorer's process cannot begin: its process ended with status 6"
    mark = tmp_path / "mark"
    for workers, scores, failures in ((2, [float(n) for n in range(40)], {}), (1, [None] * 40, {told: 40})):
        pool = Pool(f"{file}:Fragile", {"mark": str(mark)}, workers=workers)
        try:
            assert pool(asked(prompts)) == scores
            assert pool.failures == failures
            mark.unlink()
            assert pool(asked(["fine"] * 40)) == [float(n) for n in range(40)]
            assert None not in pool._workers, "all are there again"
        finally:
            pool.close()


def test_files_are_found_from_the_folder_the_pool_was_made_in(file, monkeypatch):
    monkeypatch.chdir(os.path.dirname(file))
    pool = Pool("scorer.py:moody", workers=1)
    try:
        assert pool(asked(["fine", "fine"])) == [0.0, 1.0]
    finally:
        pool.close()


def test_run_files_put_a_reward_into_processes(file):
    score = parse({"jpeg": {"weight": 2.0, "quality": 50, "workers": 1, "timeout": 30}})
    try:
        here = parse({"jpeg": {"weight": 2.0, "quality": 50}})
        assert score(asked(["a", "b"])) == here(asked(["a", "b"]))
    finally:
        score.close()


def test_nothing_to_score_is_no_score_and_large_clips_go_one_at_a_time(file, monkeypatch):
    monkeypatch.setattr("loopwright.rewards.pool.BYTES", 20)
    pool = Pool(f"{file}:Alone", workers=1)
    try:
        assert pool([]) == []
        assert pool(asked(["a", "b", "c"])) == [1.0, 1.0, 1.0]
    finally:
        pool.close()
