"""DiffusionNFT's loss is its formula: good samples draw the velocity, bad ones repel it."""

import numpy as np
import pytest
import torch

from loopwright.catalog import find, velocity
from loopwright.distributed.shard import trained
from loopwright.errors import RequestError
from loopwright.training.methods import Batch, Material, Moment
from loopwright.training.methods.nft import HELD, Nft, Settings
from loopwright.training.noise import generator
from loopwright.weights.load import load_component

MOMENT, ROWS = Moment(3, 7, 0), 3


@pytest.fixture
def network(labels):
    return load_component(find(str(labels)).components["transformer"], labels, "cpu").requires_grad_(True)


@pytest.fixture
def nft(labels, network):
    card = find(str(labels))
    given = Material(
        card, velocity(card), ("transformer",), torch.float32, "sdpa", None, trained({"transformer": network})
    )
    return lambda **settings: Nft(Settings(**settings), given, adapters=False)


def batch(advantages=(1.5, -0.5, 9.0)):
    source = torch.Generator().manual_seed(0)
    tensors = {
        "latents": torch.randn(ROWS, 1, 1, 4, 4, generator=source),
        "row": torch.tensor([[900.0, 1.0, -0.1], [500.0, 1.0, -0.1], [100.0, 1.0, -0.1]]),
        "text": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]]),
        "advantage": torch.tensor(advantages),
    }
    return Batch(tensors, (), (4, 5, 6), ROWS, {"model": "transformer"})


def noisy(given):
    """Samples, noise levels and noised samples of a batch, in float64."""
    x0 = given.tensors["latents"]
    eps = torch.stack([torch.randn(x0.shape[1:], generator=generator("nft", 3, 7, place)) for place in given.places])
    sigma = (given.tensors["row"][:, 0] / 1000).view(-1, 1, 1, 1, 1)
    return x0.double(), sigma.double(), ((1 - sigma) * x0 + sigma * eps)


def predicted(network, given, x):
    with torch.no_grad():
        return velocity_of(network, given, x).double()


def velocity_of(network, given, x):
    return network(x.flatten(1), given.tensors["row"][:, 0], given.tensors["text"][:, 0]).view_as(x)


def by_hand(given, old, new, beta, sizes=None):
    """The loss of each row and what errors were divided by, in float64."""
    x0, sigma, x = noisy(given)
    r = 0.5 + np.clip(given.tensors["advantage"].double().numpy(), -5, 5) / 10
    errors, used = [], []
    for index, v in enumerate((beta * new + (1 - beta) * old, (1 + beta) * old - beta * new)):
        apart = (x.double() - sigma * v - x0).flatten(1).numpy()
        used.append(np.abs(apart).mean(1) if sizes is None else sizes[index])
        errors.append((apart**2).mean(1) / used[-1])
    return 5 * (r * errors[0] + (1 - r) * errors[1]) / beta, used


def moved_away(network):
    with torch.no_grad():
        network.give.weight += 0.02 * torch.randn(network.give.weight.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_loss_is_the_formula_and_its_gradient_that_of_finite_differences(nft, network, beta):
    """What errors are divided by takes no gradient, so the differences hold it."""
    given, method = batch(), nft(beta=beta, kl=0.0)
    _, _, x = noisy(given)
    old = predicted(network, given, x)
    moved_away(network)
    found = method.losses({"transformer": network}, given, MOMENT)
    expected, sizes = by_hand(given, old, predicted(network, given, x), beta)
    np.testing.assert_allclose(found.rows.detach().numpy(), expected, rtol=1e-4)
    weight = network.give.weight
    found.rows.mean().backward()
    direction, moved = weight.grad / weight.grad.norm(), []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * 1e-3 * direction
            moved.append(by_hand(given, old, predicted(network, given, x), beta, sizes)[0].mean())
            weight -= sign * 1e-3 * direction
    assert (moved[0] - moved[1]) / 2e-3 == pytest.approx(weight.grad.norm().item(), rel=1e-2)


def test_at_the_old_policy_the_gradient_has_the_sign_of_two_r_minus_one(nft, network):
    def gradient(advantage):
        network.zero_grad()
        losses = nft(kl=0.0).losses({"transformer": network}, batch((advantage,) * ROWS), MOMENT)
        losses.rows.mean().backward()
        return network.give.weight.grad.clone()

    good, bad, half = gradient(5.0), gradient(-5.0), gradient(2.5)
    assert gradient(0.0).abs().max() < 1e-6 * good.abs().max()
    torch.testing.assert_close(bad, -good)
    torch.testing.assert_close(half, good / 2)
    supervised = batch()
    network.zero_grad()
    x0, sigma, x = noisy(supervised)
    v = velocity_of(network, supervised, x)
    (x.double() - sigma * v.double() - x0).square().mean().backward()
    assert torch.nn.functional.cosine_similarity(good.flatten(), network.give.weight.grad.flatten(), dim=0) > 0.8


def test_positive_alone_leaves_out_what_bad_samples_repel(nft, network):
    given = batch((-5.0,) * ROWS)
    both, one = (nft(kl=0.0, positive_only=alone).losses({"transformer": network}, given, MOMENT) for alone in (0, 1))
    assert (one.rows == 0).all() and (both.rows > 0).all()


def test_the_old_policy_samples_follows_and_is_kept(nft, network):
    method = nft()
    first = network.give.weight.detach().clone()
    moved_away(network)
    moved = network.give.weight.detach().clone()
    with method.sampling():
        assert torch.equal(network.give.weight, first)
    assert torch.equal(network.give.weight, moved)
    kept = method.tensors()["old.transformer.give.weight"]
    assert torch.equal(kept, first)
    method.renew(10)
    torch.testing.assert_close(kept, 0.01 * first + 0.99 * moved)
    before = kept.clone()
    moved_away(network)
    method.renew(10_000)
    torch.testing.assert_close(kept, HELD * before + (1 - HELD) * network.give.weight.detach())


def test_the_anchor_is_the_distance_from_what_the_network_was(nft, network):
    given, method = batch(), nft(kl=0.5)
    _, _, x = noisy(given)
    before = predicted(network, given, x)
    plain = nft(kl=0.0)
    moved_away(network)
    found, without = (each.losses({"transformer": network}, given, MOMENT) for each in (method, plain))
    expected = (predicted(network, given, x) - before).square().flatten(1).mean(1).float()
    torch.testing.assert_close(found.logs["kl"], expected, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(found.rows, without.rows + 0.5 * expected)


@pytest.mark.parametrize("name", ["beta", "advantage_clip"])
def test_settings_that_cannot_be_are_refused(name):
    with pytest.raises(RequestError, match=f"nft.{name} must be above 0"):
        Settings(**{name: 0.0})
