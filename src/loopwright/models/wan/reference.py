"""diffusers' own pipeline on a card's checkpoint, for `verify`: loaded by diffusers, run by diffusers.

Nothing of this package touches its weights or its arithmetic; only the parameters of a request are handed over.
"""

from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVideoToVideoPipeline,
)
from diffusers.video_processor import VideoProcessor

from ...backends.precision import torch_dtype
from ...card import Card, Component
from ...request import Request
from .program import pictures

_CLASSES = {
    "text_to_video": WanPipeline,
    "image_to_video": WanImageToVideoPipeline,
    "video_to_video": WanVideoToVideoPipeline,
}


def pipeline(card: Card, request: Request, locate: Callable[[Card, Component], Path], device: str) -> DiffusionPipeline:
    """The pipeline of the request's task, each component in the card's precision."""
    parts: dict[str, object] = {}
    for name, component in card.components.items():
        library, _, cls = component.kind.rpartition(".")
        dtype = {"torch_dtype": torch_dtype(component.dtype)} if component.dtype else {}
        loader = getattr(diffusers if library == "diffusers" else transformers, cls)
        parts[name] = loader.from_pretrained(locate(card, component) / component.subfolder, **dtype)
    parts["scheduler"] = _scheduler(card, request)
    if request.task == "image_to_video":
        parts = {"image_encoder": None, "image_processor": None, **parts}
    if request.task != "video_to_video":
        parts |= {"expand_timesteps": card.settings["per_token"], "boundary_ratio": card.settings["boundary"]}
    built = _CLASSES[request.task](**parts)
    if request.task == "video_to_video":
        # this pipeline counts the autoencoder's temporal layers instead of reading its factor, which patching changes
        factor = card.settings["spatial_stride"]
        built.vae_scale_factor_spatial, built.video_processor = factor, VideoProcessor(vae_scale_factor=factor)
    built.set_progress_bar_config(disable=True)
    return built.to(device)


def _scheduler(card: Card, request: Request) -> SchedulerMixin:
    train_steps = card.settings["train_steps"]
    if any(semantics.startswith("flow_euler") for semantics in card.loops.values()):
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=train_steps, shift=request.flow_shift)
    return UniPCMultistepScheduler(
        num_train_timesteps=train_steps,
        solver_order=card.settings["solver_order"],
        flow_shift=request.flow_shift,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
    )


def run(
    built: DiffusionPipeline, request: Request, card: Card, on_step: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Run the request; `on_step` sees the latents after each step. Returns the final latents [1, C, T, H, W]."""
    arguments: dict[str, object] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "max_sequence_length": request.max_sequence_length,
    }
    if request.video is not None:
        arguments |= {"video": pictures(request.video)[: request.num_frames], "strength": request.strength}
    else:
        arguments["num_frames"] = request.num_frames
    if request.image is not None:
        arguments["image"] = pictures(request.image)[0]
    if card.settings["boundary"] is not None:
        arguments["guidance_scale_2"] = request.guidance_scale_2

    def callback(_: object, index: int, timestep: object, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        on_step(values["latents"])
        return values

    latents: torch.Tensor = built(
        **arguments,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="latent",
        callback_on_step_end=callback,
    ).frames
    return latents


def decode(built: DiffusionPipeline, latents: torch.Tensor) -> torch.Tensor:
    """Latents [1, C, T, H, W] through the pipeline's autoencoder and processor: uint8 [1, N, H, W, 3]."""
    vae = built.vae
    z = latents.to(vae.device, vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(z.device, z.dtype)
    scale = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(z.device, z.dtype)
    with torch.no_grad():
        video = vae.decode(z / scale + mean, return_dict=False)[0]
    frames = built.video_processor.postprocess_video(video, output_type="np")
    return torch.from_numpy((frames * 255).round().astype("uint8"))
