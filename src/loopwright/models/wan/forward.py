"""The ops of the Wan family: pure functions that call diffusers' and transformers' modules.

The autoencoder's causal layers remember the last frames. diffusers keeps that memory on the module; here it comes in
and goes out as tensors (`carry`), so that any number of clips can be en- or decoded at once on one module.

Shapes: B rows, C latent channels, T latent frames, H and W latent sizes, L tokens, D width; N the video's frames.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from ...backends.precision import torch_dtype
from ...loops.common import finite
from ...request import ATTENTION, KERNELS
from .install import bound
from .whole_clip import WholeClip

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

Parts = Mapping[str, torch.nn.Module]
Out = dict[str, torch.Tensor]


def encode_text(parts: Parts, *, ids: torch.Tensor, mask: torch.Tensor, dtype: str) -> Out:
    """ids, mask int64 [B, L] -> [B, L, D] in the transformer's dtype, zero past the last real token."""
    hidden = parts["text_encoder"](ids, mask).last_hidden_state
    hidden = torch.where(mask.bool().unsqueeze(-1), hidden, torch.zeros_like(hidden)).to(torch_dtype(dtype))
    return {"out": hidden, "finite": finite(hidden)}


def encode_image(parts: Parts, *, pixels: torch.Tensor, dtype: str) -> Out:
    """CLIP pixels [B, 3, 224, 224] -> the last hidden states but one [B, 257, D]."""
    hidden = parts["image_encoder"](pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    hidden = hidden.to(torch_dtype(dtype))
    return {"out": hidden, "finite": finite(hidden)}


def velocity(
    transformer: "WanTransformer3DModel",
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    condition: torch.Tensor | None = None,
    image_embeds: torch.Tensor | None = None,
    attention: str = ATTENTION,
    kernels: str = KERNELS,
) -> torch.Tensor:
    """Wan2.1 and the A14B experts. latents float32 [B, C, T, H, W], timestep [B] in 0..1000 -> velocity of that shape.

    `condition` [B, 4 + C, T, H, W] is the image model's mask and encoded first frame.
    """
    x = latents if condition is None else torch.cat([latents, condition], dim=1)
    with bound(transformer, attention, kernels):
        out: torch.Tensor = transformer(
            hidden_states=x.to(transformer.dtype),
            timestep=timestep,
            encoder_hidden_states=text,
            encoder_hidden_states_image=image_embeds,
            return_dict=False,
        )[0]
    return out


def velocity_per_token(
    transformer: "WanTransformer3DModel",
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    first_frame: torch.Tensor | None = None,
    attention: str = ATTENTION,
    kernels: str = KERNELS,
) -> torch.Tensor:
    """Wan2.2 TI2V: a timestep per token [B, T*H*W/4]; tokens of a given first frame [B, C, 1, H, W] are at 0."""
    _, _, frames, height, width = latents.shape
    free = torch.ones(1, 1, frames, height, width, dtype=torch.float32, device=latents.device)
    x = latents
    if first_frame is not None:
        free[:, :, 0] = 0
        x = (1 - free) * first_frame + free * latents
    # every second row and column whatever the patch: the reference does the same
    tokens = free[0, 0, :, ::2, ::2].reshape(1, -1)
    with bound(transformer, attention, kernels):
        out: torch.Tensor = transformer(
            hidden_states=x.to(transformer.dtype),
            timestep=timestep[:, None] * tokens,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
    return out


def pin_first_frame(parts: Parts, *, latents: torch.Tensor, first_frame: torch.Tensor) -> Out:
    """The given first frame [B, C, 1, H, W] replaces that of the latents [B, C, T, H, W]."""
    out = torch.cat([first_frame.to(latents.dtype), latents[:, :, 1:]], dim=2)
    return {"out": out, "finite": finite(out)}


def open_pixels(parts: Parts, *, pixels: torch.Tensor, frames: int) -> Out:
    """Pixels [B, 3, N, H*s, W*s] in -1..1 -> the encoder's input; black frames are added up to `frames`."""
    vae: AutoencoderKLWan = parts["vae"]
    missing = frames - pixels.shape[2]
    if missing:
        pixels = torch.cat([pixels, pixels.new_zeros(*pixels.shape[:2], missing, *pixels.shape[3:])], dim=2)
    x = pixels.to(vae.dtype)
    return {"out": x if vae.config.patch_size is None else patchify(x, patch_size=vae.config.patch_size)}


def encode_chunk(parts: Parts, *, x: torch.Tensor, **carry: torch.Tensor) -> Out:
    """The first frame, or four more -> one latent frame before the last convolution."""
    vae: AutoencoderKLWan = parts["vae"]
    memory = _recall(carry, vae._cached_conv_counts["encoder"])
    out = vae.encoder(x, feat_cache=memory, feat_idx=[0])
    return {"out": out, "finite": finite(out), **_remember(memory, x)}


def close_latents(parts: Parts, **chunks: torch.Tensor) -> Out:
    """All chunks -> the posterior's mode, normalised per channel, float32 [B, C, T, H, W]."""
    return _normalised(parts, _posterior(parts, chunks).chunk(2, dim=1)[0])


def close_posterior(parts: Parts, **chunks: torch.Tensor) -> Out:
    """All chunks -> the posterior's means and log-variances [B, 2C, T, H, W], in the autoencoder's dtype."""
    out = _posterior(parts, chunks)
    return {"out": out, "finite": finite(out)}


def draw_latents(parts: Parts, *, posterior: torch.Tensor, noise: torch.Tensor) -> Out:
    """A draw from the posterior [B, 2C, T, H, W] by standard noise [B, C, T, H, W], normalised as `close_latents`."""
    gaussian = DiagonalGaussianDistribution(posterior)
    return _normalised(parts, gaussian.mean + gaussian.std * noise)


def close_condition(parts: Parts, **chunks: torch.Tensor) -> Out:
    """As `close_latents`, with the mask of given frames (four channels, one per pixel frame of a latent) before it."""
    latents = close_latents(parts, **chunks)["out"]
    mask = latents.new_zeros(latents.shape[0], 4, *latents.shape[2:])
    mask[:, :, 0] = 1
    out = torch.cat([mask, latents], dim=1)
    return {"out": out, "finite": finite(out)}


def open_latents(parts: Parts, *, latents: torch.Tensor) -> Out:
    """Normalised latents [B, C, T, H, W] -> the decoder's input."""
    vae: AutoencoderKLWan = parts["vae"]
    z = latents.to(vae.dtype)
    shift, scale = _statistics(vae, z)
    return {"out": vae.post_quant_conv(z / scale + shift)}


def decode_chunk(parts: Parts, *, x: torch.Tensor, **carry: torch.Tensor) -> Out:
    """One latent frame -> its pixels, uint8 [B, 1 or 4, H*s, W*s, 3]; rounding half to even, as numpy does."""
    vae: AutoencoderKLWan = parts["vae"]
    memory = _recall(carry, vae._cached_conv_counts["decoder"])
    out = vae.decoder(x, feat_cache=memory, feat_idx=[0], first_chunk=not carry)
    kept = _remember(memory, x)
    flags = finite(out)
    if vae.config.patch_size is not None:
        out = unpatchify(out, patch_size=vae.config.patch_size)
    return {"out": _pixels(out), "finite": flags, **kept}


def decode_picture(parts: Parts, *, x: torch.Tensor) -> Out:
    """As `decode_chunk` of a first frame that nothing follows: its past is zeros, so nothing is computed over time."""
    out = WholeClip(parts["vae"]).decoded(x)
    return {"out": _pixels(out), "finite": finite(out)}


def _pixels(video: torch.Tensor) -> torch.Tensor:
    """[B, 3, T, H, W] around -1..1 -> uint8 [B, T, H, W, 3]."""
    video = (video.clamp(-1.0, 1.0) * 0.5 + 0.5).clamp(0, 1).float()
    return (video * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def _posterior(parts: Parts, chunks: Mapping[str, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = parts["vae"].quant_conv(torch.cat(list(chunks.values()), dim=2))  # type: ignore[operator]
    return out


def _normalised(parts: Parts, latents: torch.Tensor) -> Out:
    latents = latents.float()
    shift, scale = _statistics(parts["vae"], latents)  # type: ignore[arg-type]
    out = (latents - shift) * scale
    return {"out": out, "finite": finite(out)}


def _statistics(vae: "AutoencoderKLWan", like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents' mean and the *reciprocal* of their deviation [1, C, 1, 1, 1], rounded as the reference rounds."""
    mean, deviation = (
        # loading a component in another thread changes the default dtype for a while
        torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1).to(like.device, like.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1.0 / deviation


# A layer's memory is None before the first chunk, the word "Rep" after it in upsampling layers, then a tensor.
# As row tensors: absent, a tensor of no width, a tensor.


def _recall(carry: Mapping[str, torch.Tensor], layers: int) -> list[torch.Tensor | str | None]:
    memory: list[torch.Tensor | str | None] = [None] * layers
    for name, item in carry.items():
        memory[int(name.removeprefix("memory_"))] = "Rep" if item.ndim == 2 else item
    return memory


def _remember(memory: list[torch.Tensor | str | None], x: torch.Tensor) -> Out:
    empty = x.new_zeros(x.shape[0], 0)
    return {f"memory_{i:03}": empty if isinstance(m, str) else m for i, m in enumerate(memory) if m is not None}
