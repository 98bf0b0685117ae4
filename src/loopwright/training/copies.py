"""Weights kept beside those in training: an average, an older policy, what the run began with. Sharded alike.

    old = Copy(parameters)
    old.follow(0.1)                     # a tenth of the way to the weights as they are now
    with old.standing_in():             # the networks have the copy's weights
        ...

Values change places, tensors stay: what a network computes depends on where its weights lie, in the last bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..distributed.shard import local


class Copy:
    """A copy of parameters, by their names, as they are now."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move by this share of the way to the weights as they are now."""
        ours = [local(tensor) for tensor in self.tensors.values()]
        theirs = [local(parameter.detach()) for parameter in self._parameters.values()]
        torch._foreach_lerp_(ours, theirs, share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the copy with the weights; again, and all is as before."""
        for name, parameter in self._parameters.items():
            ours, theirs = local(self.tensors[name]), local(parameter.detach())
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """The networks with the copy's weights, for a `with` block. A backward pass must not reach over its ends."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
