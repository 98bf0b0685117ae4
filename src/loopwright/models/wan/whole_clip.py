"""A Wan autoencoder over whole clips at once, for training and for encoding many clips.

    clip = WholeClip(vae)
    mean, log_variance = clip.encode(video)         # [B, 3, T, H, W] in -1..1 -> [B, C, t, h, w] each
    video = clip.decode(mean)                       # not clamped

Serving goes chunk by chunk with a memory of the last frames. Because every temporal operation is causal, one pass over
all frames computes the same function, with larger kernels and no loop. Frames lie on the rows, channels last, so that
every convolution is one of two dimensions: a causal 3x3x3 kernel sees its frame and the two before it stacked along the
channels, and a single frame, whose past is zeros, needs the kernel's last slice alone.

The module's parameters are used where they are and its own forward is never called, so it cannot be sharded.
Deliberately absent: tiles, and normalisation of the latents.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    WanResidualDownBlock,
    WanResidualUpBlock,
    WanUpBlock,
    patchify,
    unpatchify,
)
from torch import nn

from ...backends.compile import raise_limit

_LIMIT = (-30.0, 20.0)  # of log-variances, as diffusers has it


def _normed(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """The norm of root mean squares and SiLU, in float32, rounded back to x's precision."""
    wide = x.float()
    norm = wide.square().sum(dim=1, keepdim=True).sqrt().clamp_min(1e-12)
    return F.silu(wide / norm * (x.shape[1] ** 0.5) * gamma.view(1, -1, 1, 1)).to(x.dtype)


def _with_past(x: torch.Tensor, frames: int) -> torch.Tensor:
    """Each frame with the two before it (zeros before the first) along the channels, the oldest first."""
    height, width = x.shape[-2:]
    clip = x.permute(0, 2, 3, 1).reshape(-1, frames, height, width, x.shape[1])
    padded = F.pad(clip, (0, 0, 0, 0, 0, 0, 2, 0))
    stacked = torch.cat([padded[:, :-2], padded[:, 1:-1], clip], dim=-1)
    return stacked.flatten(0, 1).permute(0, 3, 1, 2)


def _normed_with_past(x: torch.Tensor, gamma: torch.Tensor, frames: int) -> torch.Tensor:
    return _with_past(_normed(x, gamma), frames)


class WholeClip:
    """Both passes of an autoencoder. `compile` fuses the norms by torch.compile, for the shapes that come."""

    def __init__(self, vae: AutoencoderKLWan, *, compile: bool = False) -> None:
        self.vae = vae
        self._norm: Callable[..., torch.Tensor] = _normed
        self._norm_with_past: Callable[..., torch.Tensor] = _normed_with_past
        if compile:
            raise_limit()
            self._norm = torch.compile(_normed, dynamic=False)
            self._norm_with_past = torch.compile(_normed_with_past, dynamic=False)

    def encode(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and log-variances of the latents, as the network makes them: not normalised."""
        frames, patch, encoder = video.shape[2], self.vae.config.patch_size, self.vae.encoder
        x = _fold(video if patch is None else patchify(video, patch_size=patch))
        x = self._conv(encoder.conv_in, x, frames)
        for block in encoder.down_blocks:
            x, frames = self._shrunk(block, x, frames)
        x = self._middle(encoder.mid_block, x, frames)
        x = self._normed_conv(encoder.norm_out.gamma, encoder.conv_out, x, frames)
        x = self._conv(self.vae.quant_conv, x, frames)
        mean, log_variance = _unfold(x, frames).chunk(2, dim=1)
        return mean, log_variance.clamp(*_LIMIT)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The video of latents that are not normalised."""
        frames = latents.shape[2]
        return self.decoded(_unfold(self._conv(self.vae.post_quant_conv, _fold(latents), frames), frames))

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """The video of what `post_quant_conv` makes of latents."""
        frames, patch, decoder = x.shape[2], self.vae.config.patch_size, self.vae.decoder
        x = self._conv(decoder.conv_in, _fold(x), frames)
        x = self._middle(decoder.mid_block, x, frames)
        for block in decoder.up_blocks:
            x, frames = self._grown(block, x, frames)
        x = self._normed_conv(decoder.norm_out.gamma, decoder.conv_out, x, frames)
        video = _unfold(x, frames).contiguous()
        return video if patch is None else unpatchify(video, patch_size=patch)

    def _shrunk(self, block: nn.Module, x: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
        """By one of the encoder's blocks: residual ones are of several layers, else each layer is a block."""
        if isinstance(block, WanResidualBlock):
            return self._resnet(block, x, frames), frames
        if isinstance(block, WanResample):
            return self._down(block, x, frames)
        assert isinstance(block, WanResidualDownBlock)
        shortcut = block.avg_shortcut(_unfold(x, frames))
        for resnet in block.resnets:
            x = self._resnet(resnet, x, frames)
        if block.downsampler is not None:
            x, frames = self._down(block.downsampler, x, frames)
        return x + _fold(shortcut), frames

    def _grown(self, block: WanUpBlock | WanResidualUpBlock, x: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
        """By one of the decoder's blocks, residual or not."""
        before, before_frames = x, frames
        for resnet in block.resnets:
            x = self._resnet(resnet, x, frames)
        if isinstance(block, WanUpBlock):
            return self._up(block.upsamplers[0], x, frames) if block.upsamplers else (x, frames)
        if block.upsampler is not None:
            x, frames = self._up(block.upsampler, x, frames)
        if block.avg_shortcut is not None:
            x = x + _fold(block.avg_shortcut(_unfold(before, before_frames), first_chunk=True))
        return x, frames

    def _conv(self, conv: WanCausalConv3d, x: torch.Tensor, frames: int) -> torch.Tensor:
        stacked = conv.kernel_size[0] == 3 and frames > 1
        return _flat(conv, _with_past(x, frames) if stacked else x, stacked)

    def _normed_conv(self, gamma: torch.Tensor, conv: WanCausalConv3d, x: torch.Tensor, frames: int) -> torch.Tensor:
        if frames > 1:
            return _flat(conv, self._norm_with_past(x, gamma.flatten(), frames), True)
        return _flat(conv, self._norm(x, gamma.flatten()), False)

    def _resnet(self, block: WanResidualBlock, x: torch.Tensor, frames: int) -> torch.Tensor:
        shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else self._conv(block.conv_shortcut, x, frames)
        x = self._normed_conv(block.norm1.gamma, block.conv1, x, frames)
        return self._normed_conv(block.norm2.gamma, block.conv2, x, frames) + shortcut

    def _middle(self, block: WanMidBlock, x: torch.Tensor, frames: int) -> torch.Tensor:
        x = self._resnet(block.resnets[0], x, frames)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._resnet(resnet, _attended(attention, x), frames)
        return x

    def _down(self, block: WanResample, x: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
        """The first frame is kept; afterwards every second frame sees itself and the two before it."""
        x = block.resample(x)
        if block.mode != "downsample3d" or frames == 1:
            return x, frames
        clip = x.unflatten(0, (-1, frames))
        triples = torch.cat([clip[:, :-2:2], clip[:, 1:-1:2], clip[:, 2::2]], dim=2)
        later = F.conv2d(triples.flatten(0, 1), _three(block.time_conv), block.time_conv.bias)
        frames = (frames + 1) // 2
        joined = torch.cat([clip[:, :1], later.unflatten(0, (-1, frames - 1))], dim=1)
        return joined.flatten(0, 1).contiguous(memory_format=torch.channels_last), frames

    def _up(self, block: WanResample, x: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
        """The first frame stays single and is no past of the others."""
        if block.mode == "upsample3d" and frames > 1:
            clip = x.unflatten(0, (-1, frames))
            doubled = F.conv2d(_with_past(clip[:, 1:].flatten(0, 1), frames - 1), _three(block.time_conv),
                               block.time_conv.bias)  # fmt: skip
            doubled = doubled.unflatten(1, (2, -1)).unflatten(0, (-1, frames - 1)).flatten(1, 2)
            frames = 2 * frames - 1
            x = torch.cat([clip[:, :1], doubled], dim=1).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = block.resample[1](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out, frames


def _fold(x: torch.Tensor) -> torch.Tensor:
    """[B, C, T, H, W] -> [B * T, C, H, W], channels last."""
    return x.transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def _unfold(x: torch.Tensor, frames: int) -> torch.Tensor:
    clip: torch.Tensor = x.unflatten(0, (-1, frames))
    return clip.transpose(1, 2)


def _three(conv: WanCausalConv3d) -> torch.Tensor:
    """A kernel over three frames as one over their stack."""
    weight: torch.Tensor = conv.weight
    return weight.transpose(1, 2).flatten(1, 2)


def _flat(conv: WanCausalConv3d, x: torch.Tensor, stacked: bool) -> torch.Tensor:
    """A convolution over time and space as one over space."""
    weight = conv.weight
    kernel = weight[:, :, 0] if conv.kernel_size[0] == 1 else _three(conv) if stacked else weight[:, :, -1]
    return F.conv2d(x, kernel, conv.bias, padding=conv.kernel_size[-1] // 2)


def _attended(block: WanAttentionBlock, x: torch.Tensor) -> torch.Tensor:
    """Attention within each frame."""
    out: torch.Tensor = block(x.unsqueeze(2)).squeeze(2)
    return out
