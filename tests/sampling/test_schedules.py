"""Schedules are diffusers' schedules, bit for bit, since that is what checkpoints are sampled with."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given
from hypothesis import strategies as st

from loopwright.sampling.schedules import Schedule, euler_flow, first_step, shifted, unipc_flow

STEPS = (1, 2, 3, 4, 5, 7, 8, 10, 16, 20, 25, 30, 33, 40, 49, 50, 64, 100, 250, 999, 1000)
SHIFTS = (1.0, 2.22, 3.0, 5.0, 8.0, 12.0)  # the shipped Wan configurations have 3, 5, 8 and 12


def euler_reference(steps: int, shift: float) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler


def unipc_reference(steps: int, shift: float, order: int = 2) -> UniPCMultistepScheduler:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift,
                                        solver_order=order)  # fmt: skip
    scheduler.set_timesteps(steps)
    return scheduler


def assert_equal(schedule: Schedule, sigmas: torch.Tensor, timesteps: torch.Tensor) -> None:
    assert schedule.sigmas.dtype == np.float32 and schedule.timesteps.dtype == np.float64
    assert sigmas.dtype == torch.float32
    np.testing.assert_array_equal(schedule.sigmas, sigmas.numpy())
    np.testing.assert_array_equal(schedule.timesteps, timesteps.double().numpy())


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_euler_flow_is_the_references_bit_for_bit(steps: int, shift: float) -> None:
    scheduler = euler_reference(steps, shift)
    assert_equal(euler_flow(steps, shift=shift), scheduler.sigmas, scheduler.timesteps)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_unipc_flow_is_the_references_bit_for_bit(steps: int, shift: float) -> None:
    scheduler = unipc_reference(steps, shift)
    assert_equal(unipc_flow(steps, shift=shift), scheduler.sigmas, scheduler.timesteps)


@given(st.integers(1, 200), st.floats(0.1, 20))
def test_both_are_the_references_for_any_steps_and_shift(steps: int, shift: float) -> None:
    for schedule, scheduler in ((euler_flow(steps, shift=shift), euler_reference(steps, shift)),
                                (unipc_flow(steps, shift=shift), unipc_reference(steps, shift))):  # fmt: skip
        assert_equal(schedule, scheduler.sigmas, scheduler.timesteps)


@pytest.mark.parametrize("train_steps", [100, 1000, 4000])
def test_timesteps_scale_with_the_training_steps(train_steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=train_steps, shift=5.0)
    scheduler.set_timesteps(12)
    assert_equal(euler_flow(12, shift=5.0, train_steps=train_steps), scheduler.sigmas, scheduler.timesteps)
    scheduler = UniPCMultistepScheduler(num_train_timesteps=train_steps, prediction_type="flow_prediction",
                                        use_flow_sigmas=True, flow_shift=5.0)  # fmt: skip
    scheduler.set_timesteps(12)
    assert_equal(unipc_flow(12, shift=5.0, train_steps=train_steps), scheduler.sigmas, scheduler.timesteps)


@given(st.integers(1, 300), st.floats(0.2, 20))
def test_noise_falls_from_one_to_zero(steps: int, shift: float) -> None:
    for schedule in (euler_flow(steps, shift=shift), unipc_flow(steps, shift=shift)):
        assert len(schedule.sigmas) == len(schedule.timesteps) + 1 == steps + 1
        assert schedule.sigmas[0] == pytest.approx(1, abs=1e-5) and schedule.sigmas[-1] == 0
        assert (np.diff(schedule.sigmas) < 0).all()


@given(st.floats(0, 1), st.floats(0.1, 20))
def test_a_shift_keeps_the_ends_and_one_over_it_undoes_it(sigma: float, shift: float) -> None:
    there = shifted(np.array([0.0, sigma, 1.0]), shift)
    assert there[0] == 0 and there[2] == pytest.approx(1)
    assert shifted(there, 1 / shift)[1] == pytest.approx(sigma, abs=1e-9)


@given(st.integers(1, 200), st.floats(0.001, 1))
def test_a_partial_run_begins_where_the_references_video_to_video_does(steps: int, strength: float) -> None:
    schedule = euler_flow(steps, shift=3.0)
    kept = min(int(steps * strength), steps)  # WanVideoToVideoPipeline.get_timesteps
    assert first_step(schedule, strength) == max(steps - kept, 0)
    assert first_step(schedule, 1.0) == 0
