"""Training methods: what a batch is trained towards. One file each, and a line in `METHODS`.

    method = METHODS["sft"](run, material)
    losses = method.losses(networks, batch, Moment(seed=0, step=7, part=0))
    losses.rows                                 # [B], differentiable: what is minimised is their mean over a step

The trainer knows a method by this protocol, and networks by their roles, which are their names on the card. Those
that learn from rollouts are a `Policy` besides. Deliberately absent: optimisers, processes, files.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import nn

from .autoencoder import Autoencoder
from .batch import Batch, Losses, Material, Moment
from .grpo import Grpo
from .nft import Nft
from .policy import Policy
from .sft import Sft

if TYPE_CHECKING:
    from ..run import Run

__all__ = ["METHODS", "POLICIES", "Batch", "Losses", "Material", "Method", "Moment", "Policy"]


class Method(Protocol):
    """A loss and its random numbers, which are functions of the moment and of a row's place, never of who computes."""

    def losses(self, networks: Mapping[str, nn.Module], batch: Batch, moment: Moment) -> Losses:
        """The loss of each row at that moment."""

    def held_out(self, networks: Mapping[str, nn.Module], batch: Batch, draw: int, draws: int) -> Losses:
        """The loss of each row under draw `draw` of `draws` fixed ones, the same at every evaluation."""


POLICIES: "Mapping[str, type[Grpo | Nft]]" = {"grpo": Grpo, "nft": Nft}
METHODS: dict[str, "Callable[[Run, Material], Method]"] = {
    "sft": lambda run, material: Sft(run.sft, material),
    "grpo": lambda run, material: Grpo(run.grpo, material, adapters=run.lora is not None),
    "nft": lambda run, material: Nft(run.nft, material, adapters=run.lora is not None),
    "autoencoder": lambda run, material: Autoencoder(run.autoencoder, material, compile=run.compile),
}
