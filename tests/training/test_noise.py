"""Noise levels are drawn as published and as diffusers draws them; generators belong to their scope."""

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

from loopwright.training.noise import generator, grid, pick, shares, uniform


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_the_grid_falls_from_one_by_the_shift(shift):
    levels = grid(1000, shift)
    plain = np.arange(1000, 0, -1) / 1000
    np.testing.assert_allclose(levels, shift * plain / (1 + (shift - 1) * plain), rtol=1e-14)
    assert levels[0] == 1 and levels.dtype == np.float64


@pytest.mark.parametrize(
    ("sampling", "ours", "theirs"),
    [
        ("uniform", {}, {}),
        ("logit_normal", {"mean": 0.0, "std": 1.0}, {"logit_mean": 0.0, "logit_std": 1.0}),
        # diffusers' number grows towards the data, ours towards the noise
        ("logit_normal", {"mean": 0.7, "std": 0.5}, {"logit_mean": -0.7, "logit_std": 0.5}),
        ("mode", {"scale": 1.29}, {"mode_scale": 1.29}),
        ("mode", {"scale": -0.5}, {"mode_scale": -0.5}),
    ],
)
def test_shares_are_those_of_diffusers_draws(sampling, ours, theirs):
    count, draws = 100, 200_000
    torch.manual_seed(0)
    drawn = compute_density_for_timestep_sampling(sampling if sampling != "uniform" else "none", draws, **theirs)
    places = (drawn.double().numpy() * count).clip(0, count - 1).astype(int)
    reached = np.cumsum(np.bincount(places, minlength=count)) / draws
    edges = shares(sampling, count, **ours)
    assert edges[0] == pytest.approx(0, abs=1e-5) and edges[-1] == pytest.approx(1, abs=1e-5)
    assert np.abs(reached - edges[1:]).max() < 1.95 / np.sqrt(draws)  # Kolmogorov and Smirnov, one in a thousand


def test_a_part_of_the_grid_is_drawn_as_the_whole_is_there():
    edges = shares("logit_normal", 50)
    drawn = [pick(edges, 10, 30, (i + 0.5) / 10_000) for i in range(10_000)]
    counts = np.bincount(drawn, minlength=50)
    assert counts[:10].sum() == counts[30:].sum() == 0
    np.testing.assert_allclose(counts[10:30] / 10_000, np.diff(edges)[10:30] / (edges[30] - edges[10]), atol=2e-4)


def test_the_ends_of_a_range_are_in_it():
    edges = shares("uniform", 7)
    assert [pick(edges, 2, 5, u) for u in (0.0, 0.5, 1 - 1e-16)] == [2, 3, 4]
    assert [pick(edges, low, low + 1, 0.9999999999999999) for low in range(7)] == list(range(7))


def test_a_scope_has_its_own_numbers_and_leaves_torchs_alone():
    before = torch.random.get_rng_state()
    numbers = [uniform(generator(*scope)) for scope in [(0, 1), (0, 2), (1, 1), ("0", 1), (0, 11)]]
    assert len(set(numbers)) == 5 and uniform(generator(0, 1)) == numbers[0]
    assert torch.equal(torch.random.get_rng_state(), before)
