"""The loops of label-conditional models: the generic ones, with a prompt looked up on the host."""

from typing import cast

import torch

from ...card import Card, whole
from ...errors import RequestError
from ...loop import Env, Loop, Tensors, Unit
from ...loops.denoise import NEGATIVE, SOLVERS, TEXT, Denoise
from ...loops.once import Calls, Once
from ...program import Loops
from ...request import Request
from . import card as cards
from . import forward


def loops(card: Card) -> Loops:
    """Semantics -> loop."""
    count = len(_labels(card))
    all_loops = [
        Once(cards.TEXT, forward.encode_label, "", numbers, {"count": count}, Unit.ENCODE),
        Once(cards.PIXELS, forward.show, "", _latents, unit=Unit.DECODE),
        *(Denoise(solver, forward.velocity, card.settings) for solver in SOLVERS),
    ]
    return {loop.semantics: cast(Loop[object], loop) for loop in all_loops}  # type: ignore[attr-defined]


def numbers(request: Request, inputs: Tensors, env: Env) -> Calls:
    """The prompt's number among the labels, and that of the negative prompt under guidance; "" is none of them."""
    labels, size = cast(tuple[str, ...], env.settings["labels"]), cast(int, env.settings["size_multiple"])
    shape = (request.num_frames, request.height, request.width)
    if shape != (1, size, size):
        raise RequestError("the model makes images of one size", value=shape, choices=((1, size, size),))
    texts = {TEXT: request.prompt}
    if request.guidance_scale > 1:
        texts[NEGATIVE] = request.negative_prompt
    device = env.binding.device
    return {slot: {"number": torch.tensor([_number(text, labels)], device=device)} for slot, text in texts.items()}


def _number(text: str, labels: tuple[str, ...]) -> int:
    if text and text not in labels:
        raise RequestError("the prompt is not one of the model's labels", value=text, choices=labels)
    return labels.index(text) if text else -1


def _labels(card: Card) -> tuple[object, ...]:
    whole(card.settings, "size_multiple")
    labels = card.settings.get("labels")
    assert isinstance(labels, tuple), "describe has read them"
    return labels


def _latents(request: Request, inputs: Tensors, env: Env) -> Calls:
    return {"frames": {"latents": inputs["latents"]}}
