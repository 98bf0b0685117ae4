"""An autoencoder by reconstruction: what comes out shall be what went in, through few and noisy latents.

    loss = |error| / 2 + 4 error^2 + gradient_weight |difference of neighbours' errors| + kl_weight KL

The mean over a row's pixels, each weighted: where a batch's `focus` is 1, and on the pixels beside it, by
`focus_weight`. Latents are drawn from the posterior, so they come with noise that the decoder learns to bear. The pass
is one over whole clips, equal to serving's over chunks. Batches hold "video" [B, 3, T, H, W] in -1..1 and, if some
pixels matter more, "focus" [B, 1, T, H, W] in 0..1.

Held out are PSNRs of the posterior's mode in dB, over a clip's pixels and over those whose focus is above one half.
Deliberately absent: perceptual and adversarial losses. Source: variational autoencoders, Kingma and Welling 2014.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ... import catalog
from ...errors import RequestError
from .. import noise
from .batch import Batch, Losses, Material, Moment

ROLE = "vae"
_FAINT = 1e-10  # a square error below which a clip counts as reproduced: 100 dB


@dataclass(frozen=True, slots=True)
class Settings:
    """What reconstruction is judged by."""

    focus_weight: float = 4.0
    absolute_weight: float = 0.5
    gradient_weight: float = 0.5
    kl_weight: float = 5e-5

    def __post_init__(self) -> None:
        for name in ("focus_weight", "absolute_weight", "gradient_weight", "kl_weight"):
            if getattr(self, name) < 0:
                raise RequestError(f"autoencoder.{name} must be at least 0", value=getattr(self, name))


class Autoencoder:
    """The method of `METHODS["autoencoder"]`. `compile` fuses the norms."""

    def __init__(self, settings: Settings, material: Material, *, compile: bool = False) -> None:
        self._settings, self._material, self._compile = settings, material, compile
        self._passes: dict[bool, catalog.WholeClip] = {}

    def losses(self, networks: Mapping[str, nn.Module], batch: Batch, moment: Moment) -> Losses:
        """The weighted errors of rows [B], with the square error and the KL beside them."""
        video = batch.tensors["video"]
        source = noise.seeded(video.device, noise.generator("latents", moment.seed, moment.step, batch.places[:1]))
        with self._lowered(video):
            mean, log_variance = self._clip(networks, self._compile).encode(video)
            mean, log_variance = mean.float(), log_variance.float()
            drawn = torch.randn(mean.shape, generator=source, device=mean.device)
            out = self._clip(networks, self._compile).decode(mean + (log_variance / 2).exp() * drawn)
        error = out.float() - video
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).mean(1) / 2
        rows = self._weighed(error, self._weight(batch)) + self._settings.kl_weight * kl
        logs = {"square_error": error.detach().square().flatten(1).mean(1), "kl": kl.detach()}
        return Losses(rows, logs, tokens=mean[:, 0].numel())

    def held_out(self, networks: Mapping[str, nn.Module], batch: Batch, draw: int, draws: int) -> Losses:
        """The square errors [B] of the mode's reconstruction, cut to -1..1, and the PSNRs."""
        video = batch.tensors["video"]
        clip = self._clip(networks, compiled=False)  # of another number of rows, which would be compiled for
        with self._lowered(video):
            out = clip.decode(clip.encode(video)[0].float())
        square = (out.float().clamp(-1, 1) - video).square()
        logs = {"psnr": _decibels(square.flatten(1).mean(1))}
        if "focus" in batch.tensors:
            inside = (batch.tensors["focus"] > 0.5).expand_as(square).float()
            logs["psnr_focus"] = _decibels((square * inside).flatten(1).sum(1) / inside.flatten(1).sum(1))
        return Losses(square.flatten(1).mean(1), logs)

    def _clip(self, networks: Mapping[str, nn.Module], compiled: bool) -> catalog.WholeClip:
        if compiled not in self._passes:
            self._passes[compiled] = catalog.whole_clip(self._material.card, networks[ROLE], compile=compiled)
        return self._passes[compiled]

    def _lowered(self, video: torch.Tensor) -> AbstractContextManager[None]:
        compute = self._material.compute
        return torch.autocast(video.device.type, compute, enabled=compute != torch.float32)

    def _weight(self, batch: Batch) -> torch.Tensor:
        """[B, 1, T, H, W]. Edges need the pixels on both of their sides."""
        video, focus = batch.tensors["video"], batch.tensors.get("focus")
        if focus is None:
            return torch.ones_like(video[:, :1])
        return 1 + (self._settings.focus_weight - 1) * F.max_pool3d(focus, (1, 3, 3), 1, (0, 1, 1))

    def _weighed(self, error: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pixels = weight * (self._settings.absolute_weight * error.abs() + 4 * error.square())
        across = weight[..., 1:] * error.diff(dim=-1).abs()
        along = weight[..., 1:, :] * error.diff(dim=-2).abs()
        each = (part.flatten(1).mean(1) for part in (pixels, across, along))
        pixel, horizontal, vertical = each
        return pixel + self._settings.gradient_weight * (horizontal + vertical)


def _decibels(square: torch.Tensor) -> torch.Tensor:
    """The PSNR of square errors of pixels in -1..1, whose range is 2; NaN stays NaN."""
    return -10 * torch.log10(square.clamp(min=_FAINT) / 4)
