"""Solvers are diffusers' within rounding, treat rows apart, and are as accurate as their order says."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given
from hypothesis import strategies as st

from loopwright.sampling.schedules import euler_flow, unipc_flow
from loopwright.sampling.solvers import (
    euler_history,
    euler_table,
    euler_update,
    mixed,
    unipc_history,
    unipc_table,
    unipc_update,
)
from support import relative

Field = Callable[[torch.Tensor, float], torch.Tensor]
SHAPE = (2, 3, 4, 5)


def toy(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """A smooth nonlinear field that depends on the sample and on sigma, of any precision."""
    return torch.sin(2.3 * x + sigma) * (0.5 + sigma) - 0.7 * x.roll(1, -1) + sigma**2


def noise(seed: int = 0, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integrate(
    x: torch.Tensor, field: Field, sigmas: np.ndarray, order: int, start: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Our solver from step `start`; order 0 is Euler."""
    table = unipc_table(sigmas, order=order, start=start) if order else euler_table(sigmas)
    assert table.dtype == np.float64 and len(table) == len(sigmas) - 1
    history = unipc_history(x, order) if order else euler_history(x)
    rows = torch.from_numpy(table).to(dtype)
    for i in range(start, len(table)):
        row = rows[i : i + 1].expand(len(x), -1)
        x, history = (unipc_update if order else euler_update)(x, field(x, float(sigmas[i])), history, row)
    return x


def reference(x: torch.Tensor, field: Field, steps: int, shift: float, order: int, start: int = 0) -> torch.Tensor:
    """diffusers' scheduler on the same field."""
    if order:
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift,
                                            solver_order=order)  # fmt: skip
    else:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(start)
    for t, sigma in list(zip(scheduler.timesteps, scheduler.sigmas, strict=False))[start:]:
        x = scheduler.step(field(x, float(sigma)), t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize(("steps", "shift"), [(4, 3.0), (5, 1.0), (8, 12.0), (20, 5.0), (50, 8.0)])
def test_euler_is_the_references_bit_for_bit(steps: int, shift: float, start: int) -> None:
    ours = integrate(noise(), toy, euler_flow(steps, shift=shift).sigmas, 0, start)
    assert torch.equal(ours, reference(noise(), toy, steps, shift, 0, start))


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(("steps", "shift"), [(4, 3.0), (5, 1.0), (8, 12.0), (20, 5.0), (50, 8.0)])
def test_unipc_is_the_references_within_rounding(steps: int, shift: float, order: int, start: int) -> None:
    ours = integrate(noise(), toy, unipc_flow(steps, shift=shift).sigmas, order, start)
    assert relative(ours, reference(noise(), toy, steps, shift, order, start)) < 1e-6


def test_a_wrong_order_is_told_from_the_right_one() -> None:
    """The bound above means something: a solver of another order is far outside it."""
    for ours, theirs in itertools.permutations((1, 2, 3), 2):
        x = integrate(noise(), toy, unipc_flow(8, shift=3.0).sigmas, ours)
        assert relative(x, reference(noise(), toy, 8, 3.0, theirs)) > 1e-5


@pytest.mark.parametrize("order", [0, 2, 3])
@given(places=st.lists(st.integers(0, 9), min_size=2, max_size=5), seed=st.integers(0, 2**31))
def test_rows_at_different_steps_in_one_call_equal_separate_calls(order: int, places: list[int], seed: int) -> None:
    sigmas = unipc_flow(10, shift=3.0).sigmas
    table = torch.from_numpy(unipc_table(sigmas, order=order) if order else euler_table(sigmas)).float()
    x, v = (noise(seed + i, (len(places), 3, 4)) for i in range(2))
    empty = unipc_history(x, order) if order else euler_history(x)
    history = {name: noise(seed + 9 + i, tuple(x.shape)) for i, name in enumerate(empty)}
    update = unipc_update if order else euler_update
    together, kept = update(x, v, history, table[places])
    for b, place in enumerate(places):
        one = slice(b, b + 1)
        alone, own = update(x[one], v[one], {k: h[one] for k, h in history.items()}, table[place : place + 1])
        assert torch.equal(together[one], alone)
        assert all(torch.equal(kept[name][one], own[name]) for name in own)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_the_history_keeps_its_names_and_shapes(order: int) -> None:
    """A step's key is made of them, so every step of a run has one key."""
    x = noise()
    history = unipc_history(x, order) if order else euler_history(x)
    table = torch.from_numpy(unipc_table(unipc_flow(5, shift=3.0).sigmas, order=order or 2)).float()
    _, after = (unipc_update if order else euler_update)(x, toy(x, 1.0), history, table[:1].expand(2, -1))
    assert [(k, h.shape, h.dtype) for k, h in after.items()] == [(k, h.shape, h.dtype) for k, h in history.items()]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@given(steps=st.integers(1, 30), shift=st.floats(0.5, 12), start=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_a_constant_velocity_is_integrated_exactly(order: int, steps: int, shift: float, start: int, seed: int) -> None:
    """x_s = x0 + s v: one data point, so that every data prediction is the answer."""
    start = min(start, steps - 1)
    sigmas = (unipc_flow if order else euler_flow)(steps, shift=shift).sigmas
    data, velocity = noise(seed, dtype=torch.float64), noise(seed + 1, dtype=torch.float64)
    x = integrate(data + float(sigmas[start]) * velocity, lambda x, s: velocity, sigmas, order, start, torch.float64)
    assert relative(x, data) < 1e-9


@pytest.mark.parametrize("start", [0, 2])
def test_euler_on_a_gaussian_is_the_closed_product(start: int) -> None:
    """Data N(0, d^2): v(x, s) = x (s - d^2 (1 - s)) / (s^2 + d^2 (1 - s)^2), so Euler is a product of factors."""
    spread, sigmas = 0.6, euler_flow(12, shift=3.0).sigmas.astype(np.float64)

    def slope(s: float) -> float:
        return (s - spread**2 * (1 - s)) / (s**2 + spread**2 * (1 - s) ** 2)

    ours = integrate(noise(dtype=torch.float64), lambda x, s: slope(s) * x, sigmas, 0, start, torch.float64)
    product = np.prod([1 + (sigmas[i + 1] - sigmas[i]) * slope(sigmas[i]) for i in range(start, 12)])
    torch.testing.assert_close(ours, product * noise(dtype=torch.float64), rtol=1e-12, atol=0)


def gaussian(spread: float) -> Field:
    return lambda x, s: x * (s - spread**2 * (1 - s)) / (s**2 + spread**2 * (1 - s) ** 2)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_gaussian_arrives_at_its_own_spread(order: int) -> None:
    """The flow maps x_1 to d x_1 exactly; many steps come close."""
    sigmas = (unipc_flow if order else euler_flow)(800, shift=1.0).sigmas
    x = integrate(noise(dtype=torch.float64), gaussian(0.6), sigmas.astype(np.float64), order, 0, torch.float64)
    assert relative(x, 0.6 * noise(dtype=torch.float64)) < (5e-3 if order < 2 else 5e-4)


def errors(order: int, counts: tuple[int, ...], exact: torch.Tensor, field: Field) -> list[float]:
    found = []
    for steps in counts:
        sigmas = np.append(np.linspace(0.95, 0.05, steps), 0.0)  # both solvers on the same sigmas
        found.append(relative(integrate(noise(dtype=torch.float64), field, sigmas, order, 0, torch.float64), exact))
    return found


def test_unipc_converges_faster_than_euler() -> None:
    """Against the exact flow from 0.95 down; the last step of both is a plain data prediction from the same sigma."""
    fine = np.append(np.linspace(0.95, 0.05, 2001), 0.0)
    exact = integrate(noise(dtype=torch.float64), toy, fine, 3, 0, torch.float64)
    counts = (20, 40, 80)
    euler, second, third = (errors(order, counts, exact, toy) for order in (0, 2, 3))
    slopes = [np.polyfit(np.log(counts), np.log(found), 1)[0] for found in (euler, second, third)]
    assert -1.3 < slopes[0] < -0.7
    assert slopes[1] < -2 and slopes[2] < -2
    assert all(b < a / 5 for a, b in zip(euler, second, strict=True))
    assert all(b < a for a, b in zip(second, third, strict=True))


@pytest.mark.parametrize("order", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_is_float32_whatever_precision_the_velocity_has(order: int, dtype: torch.dtype) -> None:
    sigmas = unipc_flow(4, shift=3.0).sigmas
    table = torch.from_numpy(unipc_table(sigmas) if order else euler_table(sigmas)).float()
    x, v = noise(), noise(1, dtype=dtype)
    history = unipc_history(x) if order else euler_history(x)
    update = unipc_update if order else euler_update
    after, kept = update(x, v, history, table[:1].expand(2, -1))
    exact, _ = update(x, v.float(), history, table[:1].expand(2, -1))
    assert after.dtype == torch.float32 and all(item.dtype == torch.float32 for item in kept.values())
    assert torch.equal(after, exact)


@given(st.integers(1, 60), st.floats(0.3, 15))
def test_eulers_step_is_the_float32_difference_of_sigmas(steps: int, shift: float) -> None:
    sigmas = euler_flow(steps, shift=shift).sigmas
    table = euler_table(sigmas)
    assert table.dtype == np.float64
    np.testing.assert_array_equal(table.astype(np.float32)[:, 0], sigmas[1:] - sigmas[:-1])


@pytest.mark.parametrize("order", [1, 2, 3])
@given(steps=st.integers(1, 40), shift=st.floats(0.5, 12))
def test_every_unipc_row_keeps_what_is_already_data(order: int, steps: int, shift: float) -> None:
    """If x and all predictions are d, corrector and predictor give d: weights of a convex-like sum."""
    table = unipc_table(unipc_flow(steps, shift=shift).sigmas, order=order)
    sigma, corrector, predictor = table[:, 0], table[:, 1 : order + 4], table[:, order + 4 :]
    assert (sigma > 0).all()
    np.testing.assert_allclose(corrector.sum(1), 1, atol=1e-9)
    np.testing.assert_allclose(predictor.sum(1), 1, atol=1e-9)


def test_sigmas_without_finite_coefficients_are_refused() -> None:
    for sigmas in ([0.5, 0.5, 0.0], [0.5, 0.6, 0.0], [1.0, 0.5, 0.0]):
        with pytest.raises(ValueError, match=r"finite coefficients|math domain error"):
            unipc_table(np.array(sigmas, np.float32), order=2)


def test_rows_before_the_start_are_zero() -> None:
    table = unipc_table(unipc_flow(8, shift=3.0).sigmas, order=2, start=3)
    assert not table[:3].any() and table[3:].any(axis=1).all()
    np.testing.assert_array_equal(table[3, 1:6], [1, 0, 0, 0, 0])  # nothing to correct yet


@given(st.floats(0, 1, width=32))
def test_mixed_is_the_references_scaled_noise(sigma: float) -> None:
    data, drawn = noise(1), noise(2)
    out = mixed(data, drawn, sigma)
    s = torch.tensor(sigma, dtype=torch.float32)
    assert out.dtype == torch.float32
    assert torch.equal(out, s * drawn + (1.0 - s) * data)


def test_mixed_ends_are_the_data_and_the_noise() -> None:
    data, drawn = noise(1), noise(2)
    assert torch.equal(mixed(data, drawn, 0.0), data) and torch.equal(mixed(data, drawn, 1.0), drawn)


def test_mixed_at_the_start_is_what_the_references_schedulers_make() -> None:
    data, drawn, start = noise(1), noise(2), 3
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(8)
    theirs = scheduler.scale_noise(data, scheduler.timesteps[start : start + 1], drawn)
    assert torch.equal(mixed(data, drawn, float(euler_flow(8, shift=5.0).sigmas[start])), theirs)
