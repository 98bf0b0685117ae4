"""Wan video models: text, image and video to video, on diffusers' classes.

`describe(folder)` makes a card from a Diffusers folder without reading weights; `loops(card)` gives the loops that its
stages name; `prepare` readies a component just loaded; `velocity` and `bound` are for who runs the forward by itself;
`passes` are those of the autoencoder in training; `KNOWN` are the published checkpoints. Importing this package
imports no torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ...card import Card, Component
from ...program import Loops
from .card import PIPELINES, describe
from .published import KNOWN

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .whole_clip import WholeClip

__all__ = ["KNOWN", "PIPELINES", "bound", "describe", "loops", "passes", "prepare", "velocity"]


def loops(card: Card) -> Loops:
    """The loops of the family, by semantics. Imports torch."""
    from .program import loops as build

    return build(card)


def prepare(component: Component, part: object) -> None:
    """Give a transformer the processors and blocks through which a request's kernels are chosen. Imports torch."""
    from .install import install

    install(component, part)


def velocity(card: Card) -> Callable[..., "Tensor"]:
    """The forward that the card's denoising step runs. Imports torch."""
    from .program import velocity as of

    return of(card)


def bound(part: object, attention: str, kernels: str) -> AbstractContextManager[None]:
    """For a `with` block in which a transformer computes by this attention and these kernels. Imports torch."""
    from .install import bound as hold

    return hold(part, attention, kernels)  # type: ignore[arg-type]


def passes(autoencoder: "nn.Module", *, compile: bool = False) -> "WholeClip":
    """Passes of the autoencoder over whole clips. Imports torch."""
    from .whole_clip import WholeClip

    return WholeClip(autoencoder, compile=compile)
