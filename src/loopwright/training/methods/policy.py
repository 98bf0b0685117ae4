"""What methods of reinforcement learning have in common: they sample, and learn from samples and their advantages.

    with policy.sampling(): ...                             # the networks sample now
    examples = policy.examples(sample, source)              # rows to learn from
    policy.renew(steps)                                     # before the next epoch samples

Deliberately absent: how samples come to be (`rollouts`) and in which batches they are learnt from (`rollout_feed`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ...api.trajectory import Move
from ...request import Request
from ...weights import lora
from ..copies import Copy
from .batch import Batch

# what of a batch is not conditioning
OWN = ("latents", "row", "sample", "noise", "log_prob", "span", "step", "advantage")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of an epoch: what was asked, how it was made, what came of it (`latents` [1, C, T, H, W])."""

    request: Request
    moves: Sequence[Move]
    latents: torch.Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """A row to learn from: tensors [1, ...] by name; only those of equal `static` can share a batch."""

    tensors: Mapping[str, torch.Tensor]
    static: Mapping[str, Hashable]


class Policy(Protocol):
    """A method (`Method`) that learns from rollouts of the networks it trains.

    Attributes:
        sampler: what it samples with unless told otherwise; None is the card's own.
        noisy: whether the sampler must draw noise.
        usual: parameters of rollouts that are left out.
    """

    sampler: str | None
    noisy: bool
    usual: Mapping[str, str | int | float]

    def sampling(self) -> AbstractContextManager[None]:
        """The weights that sample, in the networks for a `with` block."""

    def examples(self, sample: Sample, source: torch.Generator) -> Sequence[Example]:
        """What is learnt from a sample, without its advantage. Random by the generator alone."""

    def renew(self, steps: int) -> None:
        """So many optimiser steps are done, and sampling begins again."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps of it besides the weights."""


def taught(moves: Sequence[Move], roles: Sequence[str]) -> list[int]:
    """Which of the steps are of a network that is trained: of two experts it may be one."""
    return [index for index, move in enumerate(moves) if move.static["model"] in roles]


class Reference:
    """The networks as they were before training: without their adapters, or with a copy of all weights."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, adapters: bool) -> None:
        self._copy = None if adapters else Copy(parameters)

    @contextmanager
    def standing_in(self, network: nn.Module) -> Iterator[None]:
        """The network as it was, without gradients, for a `with` block."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(lora.switched_off(network) if self._copy is None else self._copy.standing_in())
            yield


def conditioning(batch: Batch) -> dict[str, torch.Tensor]:
    """What the op was lent, as rows."""
    return {name: tensor for name, tensor in batch.tensors.items() if name not in OWN}
