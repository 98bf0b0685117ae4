"""Stochastic steps keep what they claim to keep, and say how likely they were."""

import math

import numpy as np
import pytest
import torch

from loopwright.sampling.schedules import euler_flow, shifted
from loopwright.sampling.stochastic import STEPPERS, log_prob, mean_std, stochastic_table, stochastic_update


def sigmas_of(steps, shift):
    return np.append(shifted(np.linspace(1, 1 / steps, steps), shift), 0).astype(np.float32)


def terminal(stepper, level, steps, shift, mean=2.0, deviation=0.5):
    """Where N(0, 1) ends up, exactly, when the data are N(mean, deviation^2): every step is linear in the latents."""
    sigmas = sigmas_of(steps, shift)
    table = stochastic_table(stepper, sigmas, np.append(np.full(steps - 1, level), 0.0))
    centre, variance = 0.0, 1.0
    for s, (of_x, of_v, std) in zip(map(float, sigmas[:-1]), table, strict=True):
        slope = (s - (1 - s) * deviation**2) / ((1 - s) ** 2 * deviation**2 + s * s)
        centre = of_x * centre + of_v * (slope * (centre - (1 - s) * mean) - mean)
        variance = (of_x + of_v * slope) ** 2 * variance + std**2
    return centre, math.sqrt(variance)


@pytest.mark.parametrize("stepper", ["flow_sde", "dance_sde"])
@pytest.mark.parametrize("level", [0.0, 0.3, 0.7, 1.2])
def test_the_flows_marginals_are_kept_with_many_steps(stepper, level):
    assert terminal(stepper, level, 1000, 1.0) == (pytest.approx(2.0), pytest.approx(0.5, abs=2e-3))


def test_cps_does_not_keep_them():
    assert terminal("cps", 0.8, 1000, 1.0)[1] == pytest.approx(0.401, abs=3e-3)


@pytest.mark.parametrize(
    ("stepper", "level", "expected"),
    [("flow_sde", 0.0, 0.369), ("flow_sde", 0.7, 0.423), ("flow_sde", 1.2, 0.473), ("cps", 0.8, 0.316)],
)
def test_ten_shifted_steps_end_where_they_are_known_to(stepper, level, expected):
    assert terminal(stepper, level, 10, 3.0)[1] == pytest.approx(expected, abs=6e-3)


@pytest.mark.parametrize("stepper", STEPPERS)
def test_without_noise_it_is_eulers_step(stepper):
    sigmas = euler_flow(8, shift=3.0).sigmas
    table = stochastic_table(stepper, sigmas, np.zeros(8))
    assert (table[:, 0] == 1).all() and (table[:, 2] == 0).all()
    np.testing.assert_array_equal(table[:, 1], np.diff(sigmas.astype(np.float64)))


@pytest.mark.parametrize("first", [1.0, 0.9999, 0.999])
def test_the_first_step_draws_about_as_much_as_there_is(first):
    """With its own denominator it would draw hundreds of times that."""
    sigmas = np.array([first, 0.9, 0.5, 0.0], dtype=np.float32)
    table = stochastic_table("flow_sde", sigmas, np.full(3, 0.7))
    assert 0.3 < table[0, 2] < 1.5


def test_the_weights_of_a_step_are_those_of_the_published_form():
    """mean = x (1 + g^2 dt / 2s) + v (1 + g^2 (1 - s) / 2s) dt, std = g sqrt(-dt), g = level sqrt(s / (1 - s))."""
    s, after, level = 0.7, 0.55, 0.7
    (of_x, of_v, std), *_ = stochastic_table("flow_sde", np.array([s, after, 0.0], np.float32), np.array([level, 0.0]))
    s, after = float(np.float32(s)), float(np.float32(after))
    g2, dt = level**2 * s / (1 - s), after - s
    assert of_x == pytest.approx(1 + g2 * dt / (2 * s))
    assert of_v == pytest.approx((1 + g2 * (1 - s) / (2 * s)) * dt)
    assert std == pytest.approx(math.sqrt(g2) * math.sqrt(-dt))


def test_log_prob_is_the_gaussian_density_per_element_and_nothing_where_nothing_was_drawn():
    generator = torch.Generator().manual_seed(0)
    x, v, z = (torch.randn(2, 4, 1, 3, 3, generator=generator) for _ in range(3))
    row = torch.tensor([[0.9, -0.1, 0.4], [1.0, -0.1, 0.0]])
    sample, found = stochastic_update(x, v, {"noise": z}, row)
    mean, _ = mean_std(x, v, row)
    expected = torch.distributions.Normal(mean[0], 0.4).log_prob(sample[0]).mean()
    torch.testing.assert_close(found["log_prob"], torch.stack([expected, torch.tensor(0.0)]))
    assert torch.equal(sample[1], mean[1])


def test_a_gradient_comes_through_the_sample_and_none_through_the_noise():
    """At the sample that was drawn, d log p / d v = z w / (std n); with the sample made from the noise anew it is 0."""
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(1, 4, 1, 2, 2, generator=generator) for _ in range(2))
    row = torch.tensor([[0.9, -0.1, 0.4]])
    v = torch.randn(x.shape, generator=generator, requires_grad=True)
    with torch.no_grad():
        recorded, _ = stochastic_update(x, v, {"noise": z}, row)
    log_prob(recorded, *mean_std(x, v, row)).sum().backward()
    torch.testing.assert_close(v.grad, z * -0.1 / 0.4 / z.numel())
    v.grad = None
    sample, _ = stochastic_update(x, v, {"noise": z}, row)
    log_prob(sample, *mean_std(x, v, row)).sum().backward()
    assert v.grad.abs().max() < 1e-7
