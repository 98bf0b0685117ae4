"""Solvers of the probability flow: a table of coefficients per request, and a pure update per step.

    table = unipc_table(schedule.sigmas)                         # float64 [N, K], on the host, once a request
    x, history = unipc_update(x, velocity, history, row)         # row: float32 [B, K], a row of the table per sample

A step reads its coefficients from a row tensor, so that one call serves samples at different places of different
schedules. Everything is linear in the tensors and done in float32, whatever precision the network runs in.
Convention: x_s = (1 - s) x0 + s noise, velocity = noise - x0, x0 = x - s velocity.

Deliberately absent: stochastic steps, and a step index.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

History = Mapping[str, torch.Tensor]


def euler_table(sigmas: NDArray[np.float32]) -> NDArray[np.float64]:
    """[N, 1]: s' - s. The difference of two float32 numbers, rounded once, as a float32 subtraction gives it."""
    wide = sigmas.astype(np.float64)
    return (wide[1:] - wide[:-1])[:, None]


def euler_update(
    x: torch.Tensor, velocity: torch.Tensor, history: History, row: torch.Tensor
) -> tuple[torch.Tensor, History]:
    """x + (s' - s) v. `x`, `velocity` float32 [B, ...], `row` float32 [B, 1]; the history is empty and stays so."""
    return x + column(row, 0, x) * velocity, history


def euler_history(x: torch.Tensor) -> History:
    """Euler remembers nothing."""
    return {}


def unipc_table(sigmas: NDArray[np.float32], *, order: int = 2, start: int = 0) -> NDArray[np.float64]:
    """UniPC, data prediction, B(h) = expm1(h) ("bh2"), final steps of lower order.

    Columns [N, 1 + (order + 3) + (order + 1)]: sigma; the corrector's weights of x, the last corrected x, the data
    predictions of steps i, i-1, ..., i-order; the predictor's weights of x and of the predictions of i, ..., i-order+1.
    Rows before `start` (video-to-video begins there, with no history) are zero.

    Source: Zhao et al. 2023, "UniPC", as UniPCMultistepScheduler evaluates it. Raises ValueError on sigmas whose
    coefficients are not finite.
    """
    steps = len(sigmas) - 1
    wide = [float(s) for s in sigmas]
    table = np.zeros((steps, 1 + (order + 3) + (order + 1)))
    if not (np.diff(sigmas[start:]) < 0).all():
        raise ValueError(f"UniPC has no finite coefficients for sigmas that do not fall: {wide}")
    used = 0
    for i in range(start, steps):
        table[i, 0] = wide[i]
        corrector, predictor = table[i, 1 : order + 4], table[i, order + 4 :]
        if i == start:
            corrector[0] = 1.0
        else:
            _correct(wide, i, used, corrector)
        used = min(order, steps - i, i - start + 1)
        _predict(wide, i, used, predictor)
    if not np.isfinite(table).all():
        raise ValueError(f"UniPC has no finite coefficients for sigmas {wide}")
    return table


def _lambda(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log(1 - sigma) - math.log(sigma)


def _basis(sigmas: list[float], base: int, target: int, order: int) -> tuple[float, list[float], list[float]]:
    """h from `base` to `target`, the ratios r_k of earlier steps and the right-hand side b of the order conditions."""
    h = _lambda(sigmas[target]) - _lambda(sigmas[base])
    ratios = [(_lambda(sigmas[base - k]) - _lambda(sigmas[base])) / h for k in range(1, order)] + [1.0]
    phi, factorial, rhs = math.expm1(-h) / -h - 1, 1, []
    for i in range(1, order + 1):
        rhs.append(phi * factorial / math.expm1(-h))
        factorial *= i + 1
        phi = phi / -h - 1 / factorial
    return h, ratios, rhs


def _predict(sigmas: list[float], i: int, order: int, out: NDArray[np.float64]) -> None:
    h, ratios, rhs = _basis(sigmas, i, i + 1, order)
    alpha, growth = 1 - sigmas[i + 1], math.expm1(-h)
    rhos = [0.5] if order == 2 else list(_solve(ratios[:-1], rhs[:-1]))
    out[0] = sigmas[i + 1] / sigmas[i]
    out[1] = -alpha * growth
    for k, (rho, ratio) in enumerate(zip(rhos, ratios, strict=False), start=1):
        weight = -alpha * growth * rho / ratio
        out[1 + k] += weight
        out[1] -= weight


def _correct(sigmas: list[float], i: int, order: int, out: NDArray[np.float64]) -> None:
    h, ratios, rhs = _basis(sigmas, i - 1, i, order)
    alpha, growth = 1 - sigmas[i], math.expm1(-h)
    rhos = [0.5] if order == 1 else list(_solve(ratios, rhs))
    out[1] = sigmas[i] / sigmas[i - 1]  # the last corrected x
    out[2] = -alpha * growth * rhos[-1]  # this step's prediction
    out[3] = -alpha * growth - out[2]
    for k, (rho, ratio) in enumerate(zip(rhos[:-1], ratios, strict=False), start=1):
        weight = -alpha * growth * rho / ratio
        out[3 + k] += weight
        out[3] -= weight


def _solve(ratios: list[float], rhs: list[float]) -> NDArray[np.float64]:
    if not ratios:
        return np.zeros(0)
    powers = np.array([[r**i for r in ratios] for i in range(len(ratios))])
    return np.asarray(np.linalg.solve(powers, np.array(rhs)), dtype=np.float64)


def unipc_update(
    x: torch.Tensor, velocity: torch.Tensor, history: History, row: torch.Tensor
) -> tuple[torch.Tensor, History]:
    """Correct `x` with this step's data prediction, then predict the next x.

    `x`, `velocity` float32 [B, ...]; `row` float32 [B, K] as `unipc_table` lays it out; `history` as `unipc_history`.
    """
    order = len(history) - 1
    data = x - column(row, 0, x) * velocity
    past = [history[f"data_{k}"] for k in range(order)]
    corrected = _weighted(row, 1, [x, history["last"], data, *past])
    following = _weighted(row, order + 4, [corrected, data, *past[: order - 1]])
    recent = [data, *past[: order - 1]]
    return following, {"last": corrected, **{f"data_{k}": item for k, item in enumerate(recent)}}


def unipc_history(x: torch.Tensor, order: int = 2) -> History:
    """Zeros: the last corrected x and the last `order` data predictions, weighted by zero until they exist."""
    return {"last": torch.zeros_like(x), **{f"data_{k}": torch.zeros_like(x) for k in range(order)}}


def mixed(data: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """(1 - s) data + s noise, float32: where a run that starts below sigma 1 begins."""
    return (1 - torch.tensor(sigma, dtype=torch.float32)) * data + torch.tensor(sigma, dtype=torch.float32) * noise


def _weighted(row: torch.Tensor, first: int, items: list[torch.Tensor]) -> torch.Tensor:
    total = column(row, first, items[0]) * items[0]
    for k, item in enumerate(items[1:], start=first + 1):
        total = total + column(row, k, item) * item
    return total


def column(row: torch.Tensor, k: int, like: torch.Tensor) -> torch.Tensor:
    return row[:, k].view(-1, *[1] * (like.ndim - 1))
