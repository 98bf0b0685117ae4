"""Noise schedules of flow matching: sigma from 1 (noise) to 0 (data), computed on the host in float64.

    schedule = unipc_flow(20, shift=3.0)        # as diffusers' UniPCMultistepScheduler with use_flow_sigmas
    schedule.sigmas                             # float32 [21], the last one 0
    schedule.timesteps                          # what the network is told, float64 [20]

Source: the schedulers' configurations of Diffusers checkpoints; a test holds them equal to diffusers bit for bit.
Deliberately absent: schedules of no checkpoint served here (Karras, exponential, beta); a card with one is refused.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# UniPC takes log(1 - sigma), so its first sigma is kept this far below 1.
_SIGMA_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Schedule:
    """`sigmas` float32 [N + 1], the last one 0; `timesteps` float64 [N], exactly the values the network is told."""

    sigmas: NDArray[np.float32]
    timesteps: NDArray[np.float64]


def shifted(sigmas: NDArray[np.floating], shift: float) -> NDArray[np.floating]:
    """s -> k s / (1 + (k - 1) s); k above 1 spends more steps near the noise."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def euler_flow(steps: int, *, shift: float, train_steps: int = 1000) -> Schedule:
    """The schedule of FlowMatchEulerDiscreteScheduler with a static shift.

    The shift acts twice on the lower end, once on the table whose last entry bounds the range and once on the range:
    what the reference does is what its checkpoints are sampled with.
    """
    table = np.linspace(1, train_steps, train_steps, dtype=np.float32)[::-1] / np.float32(train_steps)
    table = np.float32(shift) * table / (np.float32(1) + np.float32(shift - 1) * table)
    high, low = float(table[0]), float(table[-1])
    sigmas = np.linspace(high * train_steps, low * train_steps, steps) / train_steps
    sigmas = shifted(sigmas, shift).astype(np.float32)
    timesteps = (sigmas * np.float32(train_steps)).astype(np.float64)
    return Schedule(np.append(sigmas, np.float32(0)), timesteps)


def unipc_flow(steps: int, *, shift: float, train_steps: int = 1000) -> Schedule:
    """The schedule of UniPCMultistepScheduler with `use_flow_sigmas`; its timesteps are truncated to whole numbers."""
    sigmas = shifted(np.linspace(1, 1 / train_steps, steps + 1)[:-1], shift)
    if abs(sigmas[0] - 1) < _SIGMA_EPS:
        sigmas[0] -= _SIGMA_EPS
    timesteps = np.trunc(sigmas * train_steps)
    return Schedule(np.append(sigmas, 0.0).astype(np.float32), timesteps)


def first_step(schedule: Schedule, strength: float) -> int:
    """Where a run of only the last `strength` share of the schedule begins; 0 for strength 1."""
    steps = len(schedule.timesteps)
    return max(steps - min(int(steps * strength), steps), 0)
