"""Small class-conditional models: a prompt is one of a few labels, the network is a perceptron, latents are pixels.

What learning is proved with in seconds, through the very engine, loops and trainer of large models. A folder of one
holds `transformer/` and the card that `describe` makes of its configuration. Importing this package imports no torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ...card import Card, Component
from ...errors import CardError
from ...program import Loops
from .card import describe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...catalog import WholeClip

__all__ = ["bound", "describe", "loops", "passes", "prepare", "velocity"]


def loops(card: Card) -> Loops:
    """The loops of the family, by semantics. Imports torch."""
    from .program import loops as build

    return build(card)


def prepare(component: Component, part: object) -> None:
    """A perceptron has no kernels to choose."""


def velocity(card: Card) -> "Callable[..., Tensor]":
    """The forward that the card's denoising step runs. Imports torch."""
    from .forward import velocity as forward

    return forward


def bound(part: object, attention: str, kernels: str) -> AbstractContextManager[None]:
    """Nothing to hold: there is one way to compute a perceptron."""
    return nullcontext()


def passes(autoencoder: "nn.Module", *, compile: bool = False) -> "WholeClip":
    """Raises CardError: these models have no autoencoder."""
    raise CardError("models of labels have no autoencoder", remedy="train their network instead")
