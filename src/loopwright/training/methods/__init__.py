"""Training methods: what a batch is trained towards. One file each, and a line in `METHODS`.

    method = METHODS["sft"](run, material)
    losses = method.losses(networks, batch, Moment(seed=0, step=7, part=0))
    losses.rows                                 # [B], differentiable: what is minimised is their mean over a step

The trainer knows a method by this protocol, and networks by their roles, which are their names on the card. A method
that makes its own batches brings a feed of its own to the trainer. Deliberately absent: optimisers, processes, files.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import nn

from .autoencoder import Autoencoder
from .batch import Batch, Losses, Material, Moment
from .sft import Sft

if TYPE_CHECKING:
    from ..run import Run

__all__ = ["METHODS", "Batch", "Losses", "Material", "Method", "Moment"]


class Method(Protocol):
    """A loss and its random numbers, which are functions of the moment and of a row's place, never of who computes."""

    def losses(self, networks: Mapping[str, nn.Module], batch: Batch, moment: Moment) -> Losses:
        """The loss of each row at that moment."""

    def held_out(self, networks: Mapping[str, nn.Module], batch: Batch, draw: int, draws: int) -> Losses:
        """The loss of each row under draw `draw` of `draws` fixed ones, the same at every evaluation."""


METHODS: dict[str, "Callable[[Run, Material], Method]"] = {
    "sft": lambda run, material: Sft(run.sft, material),
    "autoencoder": lambda run, material: Autoencoder(run.autoencoder, material, compile=run.compile),
}
