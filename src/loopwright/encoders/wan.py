"""Wan2.1 and Wan2.2: UMT5 and either autoencoder, whatever their sizes.

Latents are drawn from the posterior, not its mode, so that training sees how much a latent says. They are kept in
float16: measured on three clips of loopwright/tiny-wan, rounding errs by 5 to 8 % of the posterior's own deviation
(rms; at most 88 %), where bfloat16 errs by 45 to 65 % (at most 656 %), which would drown the draw; and by 2.1e-4 of the
latents, an eighth of what a bfloat16 generator rounds off its input anyway (1.7e-3). float32 would take twice the space
for that. Embeddings are kept in bfloat16, which is what a bfloat16 generator gets when serving, bit for bit; a
generator in float32 sees them rounded by 1.6e-3. So is what a first frame becomes, for the same reason: it is the
posterior's mode, nothing is drawn.

A first frame becomes what the card's image-to-video program lends its denoising: `condition` [4 + C, T, H, W] (mask and
encoded frame), with `image_embeds` [257, D] where the card has a CLIP encoder, or `first_frame` [C, 1, H, W].
"""

from collections.abc import Mapping

import torch

from ..card import Card, Stage, experts
from ..errors import RequestError
from ..media import Pixels
from ..program import check
from ..request import ATTENTION, KERNELS, Frames, Request
from . import COND, LATENT, Output
from .encoder import Encoder, load, run

_FROM_IMAGE = "image_to_video"


def outputs(card: Card) -> Mapping[str, Output]:
    """Latents by the autoencoder, embeddings by the text encoder, each in the card's precision."""
    length = _defaults(card)["max_sequence_length"]
    assert isinstance(length, int)
    return {
        LATENT: Output(("vae",), card.components["vae"].dtype, "float16"),
        COND: Output(("tokenizer", "text_encoder"), card.components["text_encoder"].dtype, "bfloat16", length),
        **{
            name: Output(stage.uses, card.components[stage.uses[-1]].dtype, "bfloat16", whole=name == "condition")
            for name, stage in _of_image(card).items()
        },
    }


def validate_args(card: Card, *, height: int, width: int, num_frames: int) -> None:
    """Sizes are multiples of the autoencoder's stride times the patch, frames a multiple of its stride in time plus 1.

    So a single image passes.
    """
    check(card, _request(card, height=height, width=width, num_frames=num_frames))


def load_encoder(card: Card, device: str) -> Encoder:
    """The frozen tokenizer, text encoder and autoencoder."""
    return load(card, device)


def encode_media(encoder: Encoder, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pixels [3, T, H, W] -> one draw from the posterior [C, 1 + (T - 1) / 4, H / s, W / s], normalised per channel."""
    request = _request(encoder.card, **_sizes(pixels))
    check(encoder.card, request)
    clip = pixels.unsqueeze(0).to(encoder.instance.binding.device, torch.float32)
    posterior = run(encoder, "wan_vae.posterior/v1", request, {"pixels": clip})
    rows, channels, *shape = posterior.shape
    # as diffusers draws it: of the posterior's dtype, by the CPU's generator
    noise = torch.randn(rows, channels // 2, *shape, generator=generator, dtype=posterior.dtype)
    given = {"posterior": posterior, "noise": noise.to(posterior.device)}
    return run(encoder, "wan_vae.draw/v1", request, given)[0].cpu()


def encode_prompt(encoder: Encoder, prompt: str) -> torch.Tensor:
    """A prompt -> [L, D], L being the checkpoint's own length of prompts (512 as published)."""
    return run(encoder, "wan.text/v1", _request(encoder.card, prompt=prompt), {})[0].cpu()


def encode_first_frame(encoder: Encoder, name: str, picture: Pixels, num_frames: int) -> torch.Tensor:
    """A picture [H, W, 3] of the video's own size -> what serving makes of such a request's image."""
    card, stage = encoder.card, _of_image(encoder.card)[name]
    frame = Frames(picture.tobytes(), (1, *picture.shape))  # type: ignore[arg-type]
    height, width, _ = picture.shape
    request = _request(card, task=_FROM_IMAGE, image=frame, height=height, width=width, num_frames=num_frames)
    check(card, request)
    return run(encoder, card.loops[stage.loop], request, {})[0].cpu()


def _of_image(card: Card) -> dict[str, Stage]:
    """What the image-to-video program makes of the image and lends its denoising, with the stage that makes it."""
    program = card.programs.get(_FROM_IMAGE)
    stages = program.stages if program else ()
    lent = {slot for stage in stages if set(stage.uses) & set(experts(card)) for slot in stage.reads}
    return {slot: stage for stage in stages if stage.name != "text" for slot in stage.writes if slot in lent}


def _sizes(pixels: torch.Tensor) -> dict[str, int]:
    if pixels.ndim != 4 or pixels.shape[0] != 3 or not pixels.is_floating_point():
        raise RequestError(
            "pixels must be floating point in -1..1, of shape [3, T, H, W]",
            value=f"{str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}",
        )
    return dict(zip(("num_frames", "height", "width"), pixels.shape[1:], strict=True))


def _request(card: Card, **given: str | int | Frames) -> Request:
    """The card's own defaults and what is given. Without guidance, so that the negative prompt is not encoded."""
    plain = {"attention": ATTENTION, "kernels": KERNELS, "prompt": "", **_defaults(card)}
    task = next(iter(card.programs))
    fixed = {"task": task, "output": "latents", "mode": "exact", "rows": 1, "seed": 0, "guidance_scale": 1.0}
    return Request(model=card.name, **{**plain, **fixed, **given})  # type: ignore[arg-type]


def _defaults(card: Card) -> Mapping[str, object]:
    return card.defaults[next(iter(card.programs))]
