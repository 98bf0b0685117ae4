"""The loops of the Wan family: the generic ones with Wan's ops, and the host's preparation of prompts and pixels."""

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import cast

import numpy as np
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.video_processor import VideoProcessor
from PIL import Image
from transformers import BatchEncoding, BatchFeature

from ...card import Card, experts
from ...loop import Env, Loop, Op, Tensors, Unit
from ...loops.chunked import Chunked, Opening
from ...loops.denoise import NEGATIVE, SOLVERS, TEXT, Denoise
from ...loops.once import Calls, Once
from ...program import Loops
from ...request import Frames, Request
from . import forward
from .card import check_settings

Prepare = Callable[[Request, Tensors, Env], Opening]

# A fast tokenizer keeps padding and truncation on itself during a call; two threads would get each other's lengths.
_TOKENISING = threading.Lock()


def loops(card: Card) -> Loops:
    """Semantics -> loop, for the stages of any Wan card."""
    check_settings(card)
    dtype = card.components[experts(card)[0]].dtype
    forward_of = velocity(card)

    def encoder(semantics: str, prepare: Prepare, closing: Op) -> Chunked:
        return Chunked(
            semantics,
            "vae",
            prepare,
            _pixel_frames,
            forward.open_pixels,
            forward.encode_chunk,
            4,
            "encoded pixels",
            Unit.ENCODE,
            closing,
        )

    all_loops = [
        Once("wan.text/v1", forward.encode_text, "text_encoder", tokenise, {"dtype": dtype}),
        Once("wan.image/v1", forward.encode_image, "image_encoder", clip_pixels, {"dtype": dtype}),
        Once("wan.pin_first_frame/v1", forward.pin_first_frame, "", _latents_of, unit=Unit.ENCODE),
        encoder("wan_vae.encode/v1", pixels, forward.close_latents),
        encoder("wan_vae.condition/v1", padded_pixels, forward.close_condition),
        encoder("wan_vae.posterior/v1", _given_pixels, forward.close_posterior),
        Once("wan_vae.draw/v1", forward.draw_latents, "vae", _latents_of, unit=Unit.ENCODE),
        Chunked(
            "wan_vae.decode/v1",
            "vae",
            _latents,
            _latent_frames,
            forward.open_latents,
            forward.decode_chunk,
            1,
            "frames",
            Unit.DECODE,
            alone=forward.decode_picture,
        ),
        *(Denoise(solver, forward_of, card.settings) for solver in SOLVERS),
    ]
    # a table of loops of different states: the engine treats each state as its loop's own
    return {loop.semantics: cast(Loop[object], loop) for loop in all_loops}  # type: ignore[attr-defined]


def velocity(card: Card) -> Callable[..., torch.Tensor]:
    """The forward of the card's denoising step."""
    return forward.velocity_per_token if card.settings["per_token"] else forward.velocity


def tokenise(request: Request, inputs: Tensors, env: Env) -> Calls:
    """The prompt and, if guidance needs it, the negative prompt, cleaned and padded as the reference does."""
    texts = {TEXT: request.prompt}
    if request.guidance_scale > 1:
        texts[NEGATIVE] = request.negative_prompt
    return {slot: _tokens(env, text, request.max_sequence_length) for slot, text in texts.items()}


def _tokens(env: Env, text: str, length: int) -> dict[str, torch.Tensor]:
    tokenizer = cast(Callable[..., BatchEncoding], env.part("tokenizer"))
    with _TOKENISING:
        tokens = tokenizer(
            [prompt_clean(text)],
            padding="max_length",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
    device = env.binding.device
    return {"ids": tokens.input_ids.to(device), "mask": tokens.attention_mask.to(device)}


def clip_pixels(request: Request, inputs: Tensors, env: Env) -> Calls:
    """The image as its CLIP encoder wants it."""
    assert request.image is not None
    processor = cast(Callable[..., BatchFeature], env.part("image_processor"))
    processed = processor(images=pictures(request.image)[0], return_tensors="pt")
    return {"image_embeds": {"pixels": processed.pixel_values.to(env.binding.device)}}


def pixels(request: Request, inputs: Tensors, env: Env) -> Opening:
    """The request's video, or its image as one frame, resized to its height and width."""
    media = request.image if request.video is None else request.video
    assert media is not None
    x = _resized(media, request, env)[:, :, : request.num_frames]
    return {"pixels": x}, {"frames": x.shape[2]}


def padded_pixels(request: Request, inputs: Tensors, env: Env) -> Opening:
    """The request's image, to be followed by black frames."""
    assert request.image is not None
    return {"pixels": _resized(request.image, request, env)}, {"frames": request.num_frames}


def _resized(media: Frames, request: Request, env: Env) -> torch.Tensor:
    """float32 [1, 3, N, H, W] in -1..1."""
    processor = VideoProcessor(vae_scale_factor=env.settings["spatial_stride"])
    video: torch.Tensor = processor.preprocess_video(pictures(media), height=request.height, width=request.width)
    return video.to(env.binding.device, dtype=torch.float32)


def pictures(media: Frames) -> list[Image.Image]:
    """Frames as Pillow images."""
    return [Image.fromarray(frame) for frame in np.frombuffer(media.data, np.uint8).reshape(media.shape)]


def _given_pixels(request: Request, inputs: Tensors, env: Env) -> Opening:
    return dict(inputs), {"frames": inputs["pixels"].shape[2]}


def _latents_of(request: Request, inputs: Tensors, env: Env) -> Calls:
    return {"latents": dict(inputs)}


def _latents(request: Request, inputs: Tensors, env: Env) -> Opening:
    return {"latents": inputs["latents"]}, {}


def _pixel_frames(start: Mapping[str, torch.Tensor], static: Mapping[str, Hashable]) -> int:
    frames = static["frames"]
    assert isinstance(frames, int)
    return frames


def _latent_frames(start: Mapping[str, torch.Tensor], static: Mapping[str, Hashable]) -> int:
    return int(start["latents"].shape[2])
