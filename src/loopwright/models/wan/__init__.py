"""Wan video models: text, image and video to video, on diffusers' classes.

`describe(folder)` makes a card from a Diffusers folder without reading weights; `loops(card)` gives the loops that its
stages name; `prepare` readies a component just loaded; `KNOWN` are the published checkpoints. Importing this package
imports no torch.
"""

from ...card import Card, Component
from ...program import Loops
from .card import KNOWN, PIPELINES, describe

__all__ = ["KNOWN", "PIPELINES", "describe", "loops", "prepare"]


def loops(card: Card) -> Loops:
    """The loops of the family, by semantics. Imports torch."""
    from .program import loops as build

    return build(card)


def prepare(component: Component, part: object) -> None:
    """Give a transformer the processors and blocks through which a request's kernels are chosen. Imports torch."""
    from .install import install

    install(component, part)
