"""The loops of scorers: prompt to vector, which any clip of that prompt reuses, and frames to a score."""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from transformers import BatchEncoding, BatchFeature

from ...card import Card, whole
from ...loop import Env, Loop, Tensors, Unit
from ...loops.once import Calls, Once
from ...program import Loops
from ...request import Frames, Request
from . import forward
from .card import SCORE, TEXT


def loops(card: Card) -> Loops:
    """Semantics -> loop."""
    whole(card.settings, "frames")
    all_loops = [
        Once(TEXT, forward.embed_text, "model", tokens),
        Once(SCORE, forward.score, "model", pictures, unit=Unit.REWARD),
    ]
    return {loop.semantics: cast(Loop[object], loop) for loop in all_loops}


def tokens(request: Request, inputs: Tensors, env: Env) -> Calls:
    """The prompt's tokens, padded to the model's length, so that all prompts have one shape."""
    tokenizer = cast(Callable[..., BatchEncoding], env.part("tokenizer"))
    length, device = request.max_sequence_length, env.binding.device
    found = tokenizer([request.prompt], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {"text": {"ids": found.input_ids.to(device), "mask": found.attention_mask.to(device)}}


def pictures(request: Request, inputs: Tensors, env: Env) -> Calls:
    """Some frames, evenly spaced, as the model wants them, beside the prompt's vector."""
    assert request.video is not None
    processor = cast(Callable[..., BatchFeature], env.part("image_processor"))
    frames = spread(request.video, cast(int, env.settings["frames"]))
    pixels: torch.Tensor = processor(images=list(frames), return_tensors="pt").pixel_values
    return {"scores": {"pixels": pixels[None].to(env.binding.device), "text": inputs["text"]}}


def spread(video: Frames, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """At most `count` frames [F, H, W, 3], the first and the last among them."""
    frames = np.frombuffer(video.data, np.uint8).reshape(video.shape)
    chosen = sorted({round(place) for place in np.linspace(0, len(frames) - 1, count)})
    return frames[chosen]
