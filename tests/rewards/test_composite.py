"""Rewards by name and weight: totals, failures that stay failures, and what a run file may say."""

import importlib
import math

import numpy as np
import pytest

from lettered import sample
from loopwright.errors import BackendError, RequestError
from loopwright.rewards import JUDGES, REWARDS, Composite, judges, parse
from loopwright.rewards.jpeg import JPEG

SAMPLES = [sample("x", np.full((8, 8, 3), level, np.uint8)) for level in (0, 51, 255)]


def level(samples):
    return [float(each.frames.float().mean()) / 255 for each in samples]


def patchy(samples):
    return [None if score == 0 else math.nan if score == 1 else score for score in level(samples)]


def test_a_total_is_the_weighted_sum_of_parts_told_by_name():
    score = Composite({"level": (level, 2.0), "jpeg": (JPEG(), -0.5)})
    parts = score.parts(SAMPLES)
    assert parts["level"] == pytest.approx([0, 0.2, 1]) and parts["jpeg"] == JPEG()(SAMPLES)
    expected = [2 * a - 0.5 * b for a, b in zip(level(SAMPLES), JPEG()(SAMPLES), strict=True)]
    assert score(SAMPLES) == score.total(parts) == pytest.approx(expected)


def test_a_failed_part_fails_its_sample_and_is_counted():
    score = Composite({"level": (level, 1.0), "patchy": (patchy, 1.0)})
    assert score(SAMPLES) == [None, pytest.approx(0.4), None]
    assert score.failures == {"patchy: not a finite number": 1}


def picky(samples):
    if any(each.frames.max() == 51 for each in samples):
        raise KeyError("grey")
    return level(samples)


def test_a_reward_that_raises_costs_the_sample_that_it_raises_for_and_shows_where_once(capsys):
    score = Composite({"level": (level, 1.0), "picky": (picky, 1.0)})
    assert score(SAMPLES) == score(SAMPLES) == [0.0, None, 2.0]
    assert score.failures == {"picky: KeyError: 'grey'": 2}
    assert capsys.readouterr().err.count('raise KeyError("grey")') == 1


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda samples: [1 / 0], "ZeroDivisionError: division by zero"),
        (lambda samples: [], "ValueError: 0 scores for 1 samples"),
        (lambda samples: ["high"] * len(samples), "TypeError: a score is no number: 'high'"),
        (lambda samples: [10**400] * len(samples), "OverflowError: int too large to convert to float"),
        (lambda samples: None, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_reward_that_scores_nothing_ends_nothing_and_is_told(reward, reason):
    score = Composite({"level": (level, 1.0), "broken": (reward, 1.0)})
    assert score.parts(SAMPLES) == {"level": level(SAMPLES), "broken": [None] * 3}
    assert score.failures == {f"broken: {reason}": 3}


def test_scores_are_plain_numbers_whatever_a_reward_makes_them_of():
    score = Composite({"array": (lambda samples: np.float32(level(samples)), 1.0)})
    assert [type(each) for each in score.parts(SAMPLES)["array"]] == [float] * 3


def test_a_timeout_is_the_pools_where_there_are_workers_and_else_the_rewards_own():
    url = {"weight": 1.0, "url": "http://scorer"}
    assert own(parse({"remote": {**url, "timeout": 7.0}}))._calls._timeout == 7.0
    assert own(parse({"vision": {**url, "model": "m", "timeout": 8}}))._calls._timeout == 8
    for wrong in ({"jpeg": {"weight": 1.0, "timeout": 30}}, {f"{__file__}:level": {"weight": 1.0, "timeout": 30}}):
        with pytest.raises(RequestError, match=r"no timeout of its own: 30; give workers"):
            parse(wrong)
    both = parse({"remote": {**url, "timeout": 9.0, "workers": 1}})
    try:
        assert own(both)._timeout == 9.0 and own(both)._parameters == {"url": "http://scorer"}
    finally:
        both.close()


def own(score):
    """The only reward there."""
    ((reward, _),) = score._rewards.values()
    return reward


def test_run_files_name_rewards_functions_and_parameters(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def one(samples):\n    return [1.0] * len(samples)\n\n"
        "class Flat:\n    def __init__(self, value: float = 0.5):\n        self.value = value\n"
        "    def __call__(self, samples):\n        return [self.value] * len(samples)\n"
    )
    score = parse(
        {"jpeg": {"weight": -1, "quality": 50}, f"{file}:one": 2.0, f"{file}:Flat": {"weight": 1, "value": 3}}
    )
    assert score(SAMPLES) == pytest.approx([5 - bits for bits in JPEG(50)(SAMPLES)])
    for settings, told in (
        ({f"{file}:two": 1.0}, "two"),
        ({f"{tmp_path}/other.py:one": 1.0}, "other.py"),
        ({f"{file}:one": {"weight": 1.0, "value": 2.0}}, "no parameters"),
        ({f"{file}:Flat": {"weight": 1.0, "value": "high"}}, "must be a float"),
    ):
        with pytest.raises(RequestError, match=told):
            parse(settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "no rewards"),
        ({"beauty": 1.0}, "choices: ocr, motion"),
        ({"jpeg": 0}, "weight"),
        ({"jpeg": {"quality": 90}}, "weight"),
        ({"jpeg": {"weight": 1.0, "size": 3}}, "choices: quality"),
        ({"jpeg": {"weight": 1.0, "quality": 99}}, "1 to 95"),
        ({"drawings": 1.0}, "sprites"),
        ({"tesseract": 1.0}, "never trained on"),
    ],
)
def test_what_a_run_file_gets_wrong_is_told(settings, told):
    with pytest.raises(RequestError, match=told):
        parse(settings)


def test_a_judge_is_none_of_the_rewards_whatever_its_parameters_or_the_way_to_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def one(samples): return [1.0] * len(samples)\n")
    monkeypatch.chdir(tmp_path)
    trained = {"jpeg": 1.0, "mine.py:one": 1.0}
    for name in ("jpeg", f"{tmp_path}/mine.py:one"):
        with pytest.raises(RequestError, match="a judge must not be trained on"):
            judges({name: {"weight": 1.0, "quality": 50} if name == "jpeg" else 1.0}, trained)
    assert judges({"mine.py:one": 2.0}, {"jpeg": 1.0})(SAMPLES) == [2.0] * 3


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch):
    def missing(*names: str) -> None:
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr("loopwright.rewards.choose.importlib.import_module", missing)
    with pytest.raises(BackendError, match=r"httpx.*loopwright\[train\]"):
        parse({"remote": {"weight": 1.0, "url": "http://scorer"}})


def test_every_name_is_that_of_a_reward_here():

    for module, attribute in (*REWARDS.values(), *JUDGES.values()):
        assert callable(getattr(importlib.import_module(f"loopwright.rewards.{module}"), attribute))


def test_prompts_are_checked_before_there_is_anything_to_score():
    nothing = np.zeros((8, 8, 3), np.uint8)
    score = parse({"ocr": 1.0, "jpeg": 1.0, "motion": {"weight": 1.0, "workers": 1}})
    try:
        score.require([sample('the word "lamp"', nothing, motion="left")])
        for prompt, facts, told in (
            ("a lamp", {"motion": "left"}, "text"),
            ('the word "lamp"', {}, "motion"),
            ('the word "lamp"', {"motion": "sideways"}, "sideways"),
        ):
            with pytest.raises(RequestError, match=told):
                score.require([sample(prompt, nothing, **facts)])
    finally:
        score.close()
