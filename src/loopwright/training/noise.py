"""Noise levels of flow matching for training, and generators that belong to what they are drawn for.

    sigmas = grid(1000, shift=3.0)                      # float64 [1000], from 1 to near 0
    edges = shares("logit_normal", 1000)                # float64 [1001]: the share of draws before each of them
    index = pick(edges, 0, 1000, 0.25)                  # the level at a quarter of the draws
    generator(seed, step, place)                        # the same numbers whoever draws them, and whenever
    seeded(device, generator(seed, step))               # a generator of that device, for many numbers at once

A way of drawing levels is its distribution function on the grid, so a part of the grid is drawn from by cutting it, and
fixed levels for evaluation are its quantiles. Densities: Esser et al. 2024 (arXiv 2403.03206), section 3.1; a test
compares them with diffusers' sampling. Deliberately absent: the schedules of inference, see `sampling.schedules`.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from ..sampling.schedules import shifted

SAMPLINGS = ("uniform", "logit_normal", "mode")
_FINE = 200_001  # points at which a density without a closed form is tabulated

Levels = NDArray[np.float64]


def grid(count: int, shift: float) -> Levels:
    """`count` levels from 1 down to 1 / count, shifted towards the noise."""
    return np.asarray(shifted(np.linspace(1, 1 / count, count, dtype=np.float64), shift), dtype=np.float64)


def shares(sampling: str, count: int, *, mean: float = 0.0, std: float = 1.0, scale: float = 1.29) -> Levels:
    """The share of draws that fall before each edge of a grid of `count` levels: [count + 1], from 0 to 1.

    `mean` and `std` are of logit_normal, whose positive mean means more noise; `scale` is of mode.
    """
    edges = np.linspace(0, 1, count + 1)
    if sampling == "uniform":
        return edges
    if sampling == "logit_normal":
        with np.errstate(divide="ignore"):
            logit = np.log(edges) - np.log1p(-edges)
        return np.asarray(torch.special.ndtr(torch.from_numpy((logit + mean) / std)).numpy())
    u = np.linspace(0, 1, _FINE)
    place = 1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)  # falls as u grows
    return np.interp(edges, place[::-1], 1 - u[::-1])


def pick(edges: Levels, low: int, high: int, u: float) -> int:
    """The level of [low, high) at the quantile u in [0, 1) of the draws that fall there."""
    target = edges[low] + u * (edges[high] - edges[low])
    return int(np.clip(np.searchsorted(edges, target, side="right") - 1, low, high - 1))


def generator(*scope: object) -> torch.Generator:
    """The CPU's generator for what the scope names, such as a seed, a step and a row's place."""
    digest = hashlib.blake2b(repr(scope).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest) >> 1)


def seeded(device: torch.device, source: torch.Generator) -> torch.Generator:
    """A generator of the device that begins as that one did; its numbers are that kind of device's own."""
    return torch.Generator(device).manual_seed(source.initial_seed())


def uniform(source: torch.Generator) -> float:
    """One number in [0, 1)."""
    return float(torch.rand((), generator=source, dtype=torch.float64))
