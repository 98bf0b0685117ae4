"""What passes between the trainer and a method: rows, their losses, and the moment that random numbers belong to."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ...card import Card
from ...request import Request

Velocity = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one shape: this process's part of a step.

    Attributes:
        tensors: rows on dim 0, on the device; from a data set "latent" [B, C, T, H, W], "cond" [B, L, D], and
            what the forward takes of a first frame, by its own names.
        names: what each row is, the same in every run; none where rows are drawn while training.
        places: where each row stands in the step, over all processes and parts.
        real: so many of the rows count, the first; the rest fill up and weigh nothing.
        static: what the recorded step of a rollout was called with beside tensors, the same for all rows.
    """

    tensors: Mapping[str, torch.Tensor]
    names: tuple[str, ...]
    places: tuple[int, ...]
    real: int
    static: Mapping[str, Hashable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Losses:
    """`rows` [B] differentiable; `logs` [B] each, NaN where a row says nothing; `tokens` the networks have read."""

    rows: torch.Tensor
    logs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The run's seed, the step from 0, and which of the step's accumulated parts it is."""

    seed: int
    step: int
    part: int


@dataclass(frozen=True, slots=True)
class Material:
    """What a method is given to work with.

    Attributes:
        velocity: the forward that serving's denoising step runs, by the card's family.
        roles: the networks trained.
        compute: what they compute in; embeddings are given to them so.
        blank: the embeddings of the empty prompt [L, D], on the device; None where there are no prompts.
        parameters: those that are trained, by "network.name".
        asked: what rollouts ask of the engine, but for prompt and seed; None where there are none.
    """

    card: Card
    velocity: Velocity
    roles: tuple[str, ...]
    compute: torch.dtype
    attention: str
    blank: torch.Tensor | None
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    asked: Request | None = None
