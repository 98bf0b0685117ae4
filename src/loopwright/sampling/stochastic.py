"""Stochastic steps of flow matching, and how likely a step was: what reinforcement learning samples with.

    table = stochastic_table("flow_sde", schedule.sigmas, levels)     # float64 [N, 3]: weights of x and v, deviation
    y, found = stochastic_update(x, velocity, {"noise": z}, row)      # found["log_prob"] [B]
    _, found = stochastic_update(x, velocity, {"sample": y}, row)     # of what was drawn before; found["mean"], too

Each stepper is linear in the latents, the velocity and the noise, so a step reads three numbers and one update serves
all; at noise level 0 it is Euler's step. The noise is an input: who draws it decides what repeats. A rollout and its
training call `mean_std` alike and hand over the sample, never the noise, which would leave no gradient.
Convention: x_s = (1 - s) x0 + s noise, v = noise - x0, x0 = x - s v. Everything in float32.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from .solvers import History, column

Weights = tuple[float, float, float]


def flow_sde(s: float, after: float, level: float, bound: float) -> Weights:
    """The SDE with the flow's own marginals and diffusion g = level sqrt(s / (1 - s)).

    `bound` stands in for s in the denominator where s is so near 1 that g would be without bound.
    Source: Flow-GRPO, Liu et al. 2025 (arXiv 2505.05470).
    """
    return _reverse(s, after, level * math.sqrt(s / (1 - bound)))


def dance_sde(s: float, after: float, level: float, bound: float) -> Weights:
    """The same with a diffusion that does not depend on s. Source: DanceGRPO, Xue et al. 2025 (arXiv 2505.07818)."""
    return _reverse(s, after, level)


def cps(s: float, after: float, level: float, bound: float) -> Weights:
    """Keeps what is left of the noise at length s', of which a part is new: no more noise than the schedule has.

    Does not keep the marginals of the flow. Source: Flow-CPS, Wang and Yu 2025 (arXiv 2509.05952).
    """
    old, new = math.cos(level * math.pi / 2), math.sin(level * math.pi / 2)
    return (1 - after) + after * old, -s * (1 - after) + after * old * (1 - s), after * new


def _reverse(s: float, after: float, g: float) -> Weights:
    """One Euler-Maruyama step of dx = (v + g^2 (x + (1 - s) v) / 2 s) ds + g dw, from s to s' below it."""
    step = after - s
    drift = g * g * step / (2 * s)
    return 1 + drift, step + drift * (1 - s), g * math.sqrt(-step)


STEPPERS: Mapping[str, Callable[[float, float, float, float], Weights]] = {
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "cps": cps,
}
LEVELS: Mapping[str, float] = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8}  # what is usual for each
NEAR_ONE = 1e-2  # of sigma, within which g takes the next sigma's denominator


def stochastic_table(stepper: str, sigmas: NDArray[np.float32], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, 3] for `sigmas` [N + 1] and the noise level of each step [N]: weights of x and of v, standard deviation."""
    wide = [float(sigma) for sigma in sigmas]
    rows = []
    for s, after, level in zip(wide[:-1], wide[1:], levels, strict=True):
        bound = after if s > 1 - NEAR_ONE else s
        rows.append(STEPPERS[stepper](s, after, float(level), bound) if level else (1.0, after - s, 0.0))
    return np.array(rows)


def mean_std(x: torch.Tensor, velocity: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a step goes on average, and how far from there: [B, ...] and [B, 1, ...], of `row` float32 [B, 3]."""
    return column(row, 0, x) * x + column(row, 1, x) * velocity.float(), column(row, 2, x)


def stochastic_update(
    x: torch.Tensor, velocity: torch.Tensor, history: History, row: torch.Tensor
) -> tuple[torch.Tensor, History]:
    """A step with the history's `noise` [B, ...]; beside the sample its `log_prob` [B].

    With a recorded `sample` [B, ...] instead, that sample, its `log_prob` and the step's `mean` [B, ...].
    """
    mean, std = mean_std(x, velocity, row)
    if "sample" in history:
        return history["sample"], {"log_prob": log_prob(history["sample"], mean, std), "mean": mean}
    sample = mean + std * history["noise"]
    return sample, {"log_prob": log_prob(sample, mean, std)}


def divergence(mean: torch.Tensor, other: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """KL between two Gaussians of a step's deviation, averaged over elements as `log_prob` is, [B]; 0 without noise."""
    std = column(row, 2, mean)
    drawn = std > 0
    each = (mean - other).square() / (2 * torch.where(drawn, std, torch.ones_like(std)).square())
    return torch.where(drawn, each, torch.zeros_like(each)).flatten(1).mean(1)


def log_prob(sample: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """The log-density of a sample, averaged over its elements, float32 [B]; 0 where nothing was drawn."""
    drawn = std > 0
    safe = torch.where(drawn, std, torch.ones_like(std))
    density = -((sample - mean) / safe).square() / 2 - safe.log() - math.log(2 * math.pi) / 2
    return torch.where(drawn, density, torch.zeros_like(density)).flatten(1).mean(1)
