"""Real processes that hang, throw, die and answer nonsense: whoever is scored beside them keeps his score."""

import os
import time

import numpy as np
import pytest

from lettered import sample
from loopwright.errors import RequestError
from loopwright.rewards import Sample, parse
from loopwright.rewards.pool import Pool

SCORER = """
import os, time

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
