"""Rewards as runs have them: checked against prompts first, and the same run whether served or a function."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clip_scorer
from loopwright.errors import RequestError, StateError
from loopwright.training.plan import make
from loopwright.training.session import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return clip_scorer.build(tmp_path_factory.mktemp("clip"))


def test_the_same_run_whether_its_scorer_is_a_function_or_served(rollout_of, folder, tmp_path, labels):
    named = {"function": f"{clip_scorer.__file__}:Plain", "served": "served"}
    results = {}
    for kind, name in named.items():
        rewards = {name: {"weight": 2.0, "model": str(folder)}}
        train(rollout_of(output=str(tmp_path / kind), rewards=rewards))
        results[kind] = load_file(tmp_path / kind / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    before = load_file(labels / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, weights in results["function"].items():
        assert torch.equal(weights, results["served"][name])
    assert any(not torch.equal(weights, before[name]) for name, weights in results["function"].items())


def test_prompts_that_lack_what_a_reward_reads_are_told_before_anything_is_loaded(rollout_of):
    with pytest.raises(RequestError, match="'light' does not say its motion"):
        make(rollout_of(rewards={"jpeg": 1.0, "motion": 1.0}))


def test_a_reward_that_raises_ends_a_run_only_when_it_scores_nothing_and_then_is_told(rollout_of, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def bright(samples):\n"
        "    if any(sample.prompt == 'dark' for sample in samples):\n        raise OSError('too dark')\n"
        "    return [float(sample.frames.float().mean()) for sample in samples]\n\n"
        "def broken(samples):\n    raise KeyError('of no use')\n"
    )
    train(rollout_of(output=str(tmp_path / "bright"), rewards={f"{file}:bright": 1.0}))
    assert (tmp_path / "bright" / "model").is_dir()
    with pytest.raises(StateError, match=r"not one sample of epoch 0 was scored.*KeyError: 'of no use'"):
        train(rollout_of(output=str(tmp_path / "broken"), rewards={f"{file}:broken": 1.0}))
