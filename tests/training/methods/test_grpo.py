"""Flow-GRPO's loss is its formula, and what is reported is what is differentiated."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from loopwright.catalog import find, velocity
from loopwright.distributed.shard import trained
from loopwright.errors import RequestError
from loopwright.loops.noise import with_noise
from loopwright.program import resolve
from loopwright.training import networks
from loopwright.training.methods import Batch, Material, Moment
from loopwright.training.methods.grpo import Grpo, Settings
from loopwright.training.run import Lora
from loopwright.weights.load import load_component

MOMENT = Moment(0, 0, 0)
STD, OF_X, OF_V, ROWS = 0.3, 0.97, -0.12, 4


def material(folder, network, **changes):
    card = find(str(folder))
    asked = with_noise(resolve(card, prompt="light", seed=0), "flow_sde")
    return Material(
        card, velocity(card), ("transformer",), torch.float32, "sdpa", None, trained({"transformer": network}), asked
    )


@pytest.fixture
def network(labels):
    card = find(str(labels))
    return load_component(card.components["transformer"], labels, "cpu").requires_grad_(True)


@pytest.fixture
def grpo(labels, network):
    return lambda **settings: Grpo(Settings(**{"kl": 0.0} | settings), material(labels, network), adapters=False)


def batch(network, labels, moved=0.02):
    """Steps of another policy: samples that this one finds likelier or less likely by `moved` or so."""
    source = torch.Generator().manual_seed(0)
    latents, noise, way = (torch.randn(ROWS, 1, 1, 4, 4, generator=source) for _ in range(3))
    row = torch.tensor([[500.0, 1.0, OF_X, OF_V, STD]]).repeat(ROWS, 1)
    text = torch.tensor([[[1.0, 0.0]]]).repeat(ROWS, 1, 1)
    forward = velocity(find(str(labels)))
    with torch.no_grad():
        mean = OF_X * latents + OF_V * forward(network, latents, row[:, 0], text)
    old = mean + moved * way
    log_prob = torch.distributions.Normal(old, STD).log_prob(old + STD * noise).flatten(1).mean(1)
    tensors = {"latents": latents, "row": row, "text": text, "sample": old + STD * noise, "noise": noise}
    more = {"log_prob": log_prob, "advantage": torch.tensor([2.0, -1.0, 9.0, -0.5]), "span": torch.full((ROWS,), 0.1),
            "step": torch.tensor([0, 0, 1, 2])}  # fmt: skip
    static = {"model": "transformer", "velocity": forward, "solver": "flow_sde", "guidance": "none"}
    return Batch(tensors | more, (), tuple(range(ROWS)), ROWS, static), mean


def by_hand(given, mean):
    """Ratios and divergences in float64."""
    get = {name: tensor.double().numpy() for name, tensor in given.tensors.items()}
    mean = mean.double().numpy()
    density = -((get["sample"] - mean) ** 2) / (2 * STD**2) - math.log(STD) - math.log(2 * math.pi) / 2
    change = density.reshape(ROWS, -1).mean(1) - get["log_prob"]
    old = get["sample"] - STD * get["noise"]
    return change, ((mean - old) ** 2).reshape(ROWS, -1).mean(1) / (2 * STD**2), np.clip(get["advantage"], -5, 5)


def test_the_loss_is_the_clipped_ratios(grpo, network, labels):
    given, mean = batch(network, labels)
    change, _, advantage = by_hand(given, mean)
    clip = float(np.sort(np.abs(np.exp(change) - 1))[1:3].mean())  # of four ratios some are outside
    found = grpo(clip=clip).losses({"transformer": network}, given, MOMENT)
    ratio = np.exp(change)
    expected = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - clip, 1 + clip))
    np.testing.assert_allclose(found.rows.detach().numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(found.logs["ratio"].numpy(), ratio, rtol=1e-5)
    outside = float(found.logs["clip_high"].mean() + found.logs["clip_low"].mean())
    assert outside == np.mean(np.abs(ratio - 1) > clip) and 0 < outside < 1
    seen = [found.logs[f"logp_abs_diff/step_{step}"] for step in range(3)]
    assert [int((~each.isnan()).sum()) for each in seen] == [2, 1, 1]
    assert float(seen[1][2]) == pytest.approx(abs(change[2]), rel=1e-3)


def test_guard_takes_the_bias_from_the_ratio_and_brings_steps_to_one_scale(grpo, network, labels):
    given, mean = batch(network, labels)
    change, drift, advantage = by_hand(given, mean)
    found = grpo(guard=True, clip=1e3).losses({"transformer": network}, given, MOMENT)
    np.testing.assert_allclose(
        found.rows.detach().numpy(), -advantage * np.exp((change + drift) * STD) / 0.1, rtol=1e-5
    )


def test_beyond_a_divergence_rows_that_would_go_further_are_masked(grpo, network, labels):
    given, mean = batch(network, labels)
    change, drift, advantage = by_hand(given, mean)
    ratio, bound = np.exp(change), float(np.median(drift))
    masked = (drift > bound) & ((advantage > 0) == (ratio > 1))
    found = grpo(divergence=bound).losses({"transformer": network}, given, MOMENT)
    np.testing.assert_allclose(found.rows.detach().numpy(), np.where(masked, 0, -advantage * ratio), rtol=1e-5)
    assert grpo(divergence=1e3).losses({"transformer": network}, given, MOMENT).rows.abs().min() > 0
    masked = grpo(divergence=1e-9).losses({"transformer": network}, given, MOMENT)
    assert (masked.rows == 0).any()
    assert torch.equal(masked.logs["masked"], (masked.rows == 0).float())
    assert "masked" not in grpo().losses({"transformer": network}, given, MOMENT).logs


def test_the_anchor_is_the_divergence_from_what_the_network_was(grpo, network, labels):
    given, before = batch(network, labels)
    method = grpo(kl=0.5)
    assert float(method.losses({"transformer": network}, given, MOMENT).logs["kl"].max()) == 0
    with torch.no_grad():
        network.give.weight += 0.05
    found = method.losses({"transformer": network}, given, MOMENT)
    with torch.no_grad():
        after = OF_X * given.tensors["latents"] + OF_V * given.static["velocity"](
            network, given.tensors["latents"], given.tensors["row"][:, 0], given.tensors["text"]
        )
    expected = (after - before).square().flatten(1).mean(1) / (2 * STD**2)
    torch.testing.assert_close(found.logs["kl"], expected, rtol=1e-4, atol=0)
    without = grpo().losses({"transformer": network}, given, MOMENT)
    torch.testing.assert_close(found.rows, without.rows + 0.5 * found.logs["kl"])


@pytest.mark.parametrize("settings", [{}, {"guard": True, "clip": 1e3}, {"divergence": 1e3}, {"kl": 2.0}])
def test_what_is_reported_is_what_is_differentiated(grpo, network, labels, settings):
    given, _ = batch(network, labels)
    method, weight = grpo(**{"clip": 0.5} | settings), network.give.weight
    with torch.no_grad():
        weight += 0.02  # away from the anchor, whose slope is 0 there
    method.losses({"transformer": network}, given, MOMENT).rows.mean().backward()
    slope, direction = weight.grad.norm().item(), weight.grad / weight.grad.norm()
    moved = []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * 5e-3 * direction
            moved.append(method.losses({"transformer": network}, given, MOMENT).rows.double().mean().item())
            weight -= sign * 5e-3 * direction
    assert (moved[0] - moved[1]) / 1e-2 == pytest.approx(slope, rel=2e-2) and slope > 1e-4


def test_the_anchor_of_adapters_is_the_network_without_them(checkpoint):
    folder = checkpoint("t2v")
    card = find(str(folder))
    part = load_component(replace(card.components["transformer"], dtype="float32"), folder, "cpu")
    networks.adapt(part, Lora(rank=2), 0)
    asked = with_noise(resolve(card, prompt="a", seed=0, num_inference_steps=3), "flow_sde")
    given = Material(card, velocity(card), ("transformer",), torch.float32, "sdpa", None, {}, asked)
    method = Grpo(Settings(), given, adapters=True)
    source = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(1, 16, 1, 4, 4, generator=source) for _ in range(3))
    row = torch.tensor([[500.0, 1.0, OF_X, OF_V, STD]])
    tensors = {"latents": x, "sample": y, "noise": z, "row": row, "text": torch.randn(1, 8, 32, generator=source),
               **dict.fromkeys(("log_prob", "advantage", "span", "step"), torch.ones(1))}  # fmt: skip
    static = {"model": "transformer", "velocity": velocity(card), "solver": "flow_sde", "guidance": "none"}
    rows = Batch(tensors, (), (0,), 1, static)
    assert float(method.losses({"transformer": part}, rows, MOMENT).logs["kl"]) == 0
    adapters = [parameter for parameter in part.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in adapters:
            parameter.add_(0.1)
    found = method.losses({"transformer": part}, rows, MOMENT)
    found.rows.sum().backward()
    assert float(found.logs["kl"]) > 0
    assert adapters and all(parameter.requires_grad and parameter.grad is not None for parameter in adapters)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"clip": 0.0}, "grpo.clip must be above 0"), ({"timesteps": 0.0}, "grpo.timesteps"), ({"kl": -1.0}, "grpo.kl"),
     ({"divergence": 0.0}, "grpo.divergence"), ({"advantage_clip": 0.0}, "grpo.advantage_clip")],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(RequestError, match=said):
        Settings(**settings)
