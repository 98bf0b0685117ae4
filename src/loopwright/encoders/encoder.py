"""Encoders in memory, and how a loop of theirs is run: step by step, as the engine does for a request of its own."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .. import catalog
from ..backends.device import pick
from ..card import Card, derive, experts
from ..engine.env import RequestEnv
from ..engine.execute import Call, eager
from ..engine.flags import Flags, not_finite
from ..engine.instance import Instance
from ..engine.job import host_values
from ..engine.store import Store
from ..loop import Result, Step, key_of
from ..request import Request


@dataclass(frozen=True, slots=True)
class Encoder:
    """The frozen components of a card, each read when first used."""

    instance: Instance

    @property
    def card(self) -> Card:
        """The card of the checkpoint."""
        return self.instance.card

    def park(self) -> None:
        """Give a device's memory back: the components wait on the host, and come back when they are next used."""
        device = self.instance.binding.device
        self.instance.store.release(device, sys.maxsize)
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def load(card: Card, device: str) -> Encoder:
    """The card's components on a device. Raises BackendError for a device or precision that is not here.

    Its generators stay where they are, so whatever they assume does not matter; they are declared float32 because
    embeddings take their precision from them, and are to leave here unrounded.
    """
    unrounded = {name: replace(card.components[name], dtype="float32") for name in experts(card)}
    card = derive(card, components=unrounded, recipe=replace(card.recipe, precision=("float32",)))
    # "high", since choosing would fetch every component to learn its size
    return Encoder(
        Instance(card, catalog.loops(card), Store(0), device=pick(device), locate=catalog.locate, memory="high")
    )


def run(encoder: Encoder, semantics: str, request: Request, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The one output of a loop, where it was computed. Raises ModelError on NaN."""
    model = encoder.instance
    loop = model.loops[semantics]
    state = loop.init(request, inputs, RequestEnv(model, model.bind(request)))
    while (step := loop.next(state)) is not None:
        assert isinstance(step, Step), f"{semantics} waits, which an encoder cannot"
        tensors = eager(model, Call(step, key_of(step, model.version, {}), step.tensors, {}, 1))
        if not all(Flags(step, tensors).wait() or ()):
            raise not_finite(step.finite)
        state, _ = loop.advance(state, Result(tensors, host_values(step, tensors)))
    (out,) = loop.finish(state).values()
    return out
