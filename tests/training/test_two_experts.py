"""Rollouts of a model with two experts: each step of the record trains the network that made it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training_rollouts import Parts

from loopwright.training.methods import Moment
from loopwright.training.run import Lora
from loopwright.training.session import train
from loopwright.training.sinks import table

BOUNDARY, STEPS = 900, 6
SMALL = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": STEPS, "max_sequence_length": 32,
         "guidance_scale": 1.0, "guidance_scale_2": 1.0}  # fmt: skip
BOTH = ("transformer", "transformer_2")


@pytest.fixture
def run_of_two(rollout_of, checkpoint):
    """`run_of_two("grpo", ...)`: a run on a model whose first expert makes the steps from the boundary up."""

    def make(method: str, **settings):
        return rollout_of(method, model=str(checkpoint("a14b")), rollout={"rows": 2, "parameters": SMALL}, **settings)

    return make


@pytest.mark.parametrize("method", ["grpo", "nft"])
def test_each_experts_steps_train_that_expert_and_no_other(run_of_two, alone, method):
    parts = Parts(run_of_two(method), alone)
    seen = set()
    for batch in parts.step().parts:
        timesteps, expert = batch.tensors["row"][:, 0], batch.static["model"]
        assert set((timesteps >= BOUNDARY).tolist()) == {expert == "transformer"}
        parts.method.losses(parts.networks, batch, Moment(0, 0, 0)).rows.sum().backward()
        for name, network in parts.networks.items():
            taught = [parameter.grad is not None and bool(parameter.grad.any()) for parameter in network.parameters()]
            assert any(taught) == (name == expert)
            network.zero_grad(set_to_none=True)
        seen.add(expert)
    assert seen == set(BOTH)


def test_at_the_first_update_the_ratio_of_every_step_of_both_is_exactly_one(run_of_two):
    run = run_of_two("grpo", lora=Lora(rank=2), epochs=1, grpo={"clip": 1e-2})
    result = train(run).result
    first = table(Path(run.output) / "metrics.csv")[0]
    assert first["ratio"] == 1 and first["ratio_std"] == 0
    assert [first[f"logp_abs_diff/step_{index}"] for index in range(STEPS - 1)] == [0.0] * (STEPS - 1)
    for name in BOTH:
        assert any(tensor.any() for key, tensor in load_file(result / f"{name}.safetensors").items() if "lora_B" in key)


@pytest.mark.parametrize("method", ["grpo", "nft"])
def test_where_one_expert_is_trained_its_steps_alone_are_learnt_from(run_of_two, alone, method):
    parts = Parts(run_of_two(method, train=["transformer_2"]), alone)
    batches = parts.step().parts
    assert {batch.static["model"] for batch in batches} == {"transformer_2"}
    assert all((batch.tensors["row"][:, 0] < BOUNDARY).all() for batch in batches)
    loss = parts.method.losses(parts.networks, batches[0], Moment(0, 0, 0)).rows
    assert torch.isfinite(loss).all()
