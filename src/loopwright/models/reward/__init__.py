"""Scorers as models: how well a clip shows its prompt, by a dual encoder of transformers (CLIP).

Such a card is loaded, batched, placed and kept in memory as any other; its one task, "score", takes a video and a
prompt, and its output is a number. `rewards.served` makes a reward of it. Importing this package imports no torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ...card import Card, Component
from ...errors import CardError
from ...program import Loops
from .card import ARCHITECTURES, describe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...catalog import WholeClip

__all__ = ["ARCHITECTURES", "bound", "describe", "loops", "passes", "prepare", "velocity"]


def loops(card: Card) -> Loops:
    """The loops of the family, by semantics. Imports torch."""
    from .program import loops as build

    return build(card)


def prepare(component: Component, part: object) -> None:
    """A scorer runs under torch's own choice of kernels."""


def velocity(card: Card) -> "Callable[..., Tensor]":
    """Raises CardError: a scorer does not denoise."""
    raise CardError("a scorer generates nothing", value=card.name, remedy="load it for rewards")


def bound(part: object, attention: str, kernels: str) -> AbstractContextManager[None]:
    """Nothing to hold: there is one way to compute a scorer."""
    return nullcontext()


def passes(autoencoder: "nn.Module", *, compile: bool = False) -> "WholeClip":
    """Raises CardError: a scorer has no autoencoder."""
    raise CardError("a scorer has no autoencoder", remedy="load it for rewards")
