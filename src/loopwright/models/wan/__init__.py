"""Wan video models: text, image and video to video, on diffusers' classes.

`describe(folder)` makes a card from a Diffusers folder without reading weights; `loops(card)` gives the loops that its
stages name; `KNOWN` are the published checkpoints. Importing this package imports no torch.
"""

from ...card import Card
from ...program import Loops
from .card import KNOWN, PIPELINES, describe

__all__ = ["KNOWN", "PIPELINES", "describe", "loops"]


def loops(card: Card) -> Loops:
    """The loops of the family, by semantics. Imports torch."""
    from .program import loops as build

    return build(card)
