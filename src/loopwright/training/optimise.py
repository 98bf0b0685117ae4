"""Optimiser, learning rate, clipping and averaging, for parameters by name; sharded or not.

    optimiser = adamw(parameters, settings, lr)
    rate = lr * factor(schedule, step, steps)
    norm = clip(parameters, 1.0)

All of an optimiser's state exists from the beginning, so that a checkpoint always holds the same tensors.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..distributed.shard import local, whole
from .copies import Copy
from .run import Optimiser, Schedule

Named = Mapping[str, nn.Parameter]


def adamw(parameters: Named, settings: Optimiser, lr: float) -> torch.optim.AdamW:
    """Fused AdamW with its state made: one that never met a gradient stays at zero."""
    optimiser = torch.optim.AdamW(
        parameters.values(),
        lr=lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in parameters.values():
        optimiser.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimiser


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the learning rate is multiplied by at a step (from 0) of so many."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    done = (step - schedule.warmup) / max(steps - schedule.warmup, 1)
    if schedule.kind == "constant":
        return 1.0
    left = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.final + (1 - schedule.final) * left


def clip(parameters: Named, most: float | None) -> torch.Tensor:
    """Scale all gradients together to a norm of at most `most`; the norm before that, over all processes."""
    given = [parameter for parameter in parameters.values() if parameter.grad is not None]
    norm = whole(get_total_norm([parameter.grad for parameter in given if parameter.grad is not None]))
    if most is not None:
        clip_grads_with_norm_(given, most, norm)
    return norm


class Average(Copy):
    """Exponentially averaged weights: float32 copies, sharded as the weights are."""

    def __init__(self, parameters: Named, decay: float) -> None:
        super().__init__(parameters)
        self._decay = decay

    def update(self) -> None:
        """Move towards the weights as they are now."""
        self.follow(1 - self._decay)
