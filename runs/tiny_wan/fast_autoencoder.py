"""AutoencoderKLWan over a whole clip at once, for training.

Diffusers encodes and decodes chunk by chunk with a cache of the last frames. Because every temporal operation is
causal, one pass over all frames computes the same function with larger kernels and no Python loop; `check()`
compares the two. Activations stay in (batch * frames, channels, height, width), channels last, so that every
convolution is a 2D one: a causal 3x3x3 kernel sees its frame and the two before it stacked along the channels, and a
single frame (whose past is zeros) needs the last temporal slice alone.

Only the residual layout (`is_residual=True`) is covered.
"""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    patchify,
    unpatchify,
)
from torch import nn


def _normalised(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """WanRMS_norm without bias, then SiLU, computed in float32 and returned in the dtype of `x`."""
    wide = x.float()
    norm = wide.square().sum(dim=1, keepdim=True).sqrt().clamp_min(1e-12)
    return F.silu(wide / norm * (x.shape[1] ** 0.5) * gamma.view(1, -1, 1, 1)).to(x.dtype)


def _stack_past(x: torch.Tensor, frames: int) -> torch.Tensor:
    """Each frame with the two before it (zeros before the first), along the channels: oldest first."""
    height, width = x.shape[-2:]
    clip = x.permute(0, 2, 3, 1).reshape(-1, frames, height, width, x.shape[1])
    padded = F.pad(clip, (0, 0, 0, 0, 0, 0, 2, 0))
    stacked = torch.cat([padded[:, :-2], padded[:, 1:-1], clip], dim=-1)
    return stacked.flatten(0, 1).permute(0, 3, 1, 2)


def _normalised_stack(x: torch.Tensor, gamma: torch.Tensor, frames: int) -> torch.Tensor:
    return _stack_past(_normalised(x, gamma), frames)


class FastAutoencoder(nn.Module):
    """Whole-clip encode and decode with the weights of a diffusers autoencoder, whose parameters it shares."""

    def __init__(self, vae: AutoencoderKLWan, compile_norms: bool = False) -> None:
        super().__init__()
        if not vae.config.is_residual:
            raise ValueError("only the residual layout is covered")
        self.vae = vae
        wrap = torch.compile if compile_norms else (lambda function, **_: function)
        self._norm = wrap(_normalised, dynamic=False)
        self._norm_stack = wrap(_normalised_stack, dynamic=False)

    def encode(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log variance of the latents of `video`, (batch, 3, frames, height, width)."""
        frames = video.shape[2]
        x = self._fold(patchify(video, self.vae.config.patch_size))
        encoder = self.vae.encoder
        x = self._conv(encoder.conv_in, x, frames)
        for block in encoder.down_blocks:
            shortcut = block.avg_shortcut(self._unfold(x, frames))
            for resnet in block.resnets:
                x = self._resnet(resnet, x, frames)
            if block.downsampler is not None:
                x, frames = self._down(block.downsampler, x, frames)
            x = x + self._fold(shortcut)
        x = self._middle(encoder.mid_block, x, frames)
        x = self._normed_conv(encoder.norm_out.gamma, encoder.conv_out, x, frames)
        x = self._conv(self.vae.quant_conv, x, frames)
        mean, log_variance = self._unfold(x, frames).chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The video of `latents`, not clamped."""
        frames = latents.shape[2]
        decoder = self.vae.decoder
        x = self._conv(self.vae.post_quant_conv, self._fold(latents), frames)
        x = self._conv(decoder.conv_in, x, frames)
        x = self._middle(decoder.mid_block, x, frames)
        for block in decoder.up_blocks:
            before, before_frames = x, frames
            for resnet in block.resnets:
                x = self._resnet(resnet, x, frames)
            if block.upsampler is not None:
                x, frames = self._up(block.upsampler, x, frames)
            if block.avg_shortcut is not None:
                x = x + self._fold(block.avg_shortcut(self._unfold(before, before_frames), first_chunk=True))
        x = self._normed_conv(decoder.norm_out.gamma, decoder.conv_out, x, frames)
        return unpatchify(self._unfold(x, frames).contiguous(), self.vae.config.patch_size)

    @staticmethod
    def _fold(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last)

    @staticmethod
    def _unfold(x: torch.Tensor, frames: int) -> torch.Tensor:
        return x.unflatten(0, (-1, frames)).transpose(1, 2)

    @staticmethod
    def _kernel(conv: WanCausalConv3d, x: torch.Tensor, stacked: bool) -> torch.Tensor:
        weight = conv.weight
        if conv.kernel_size[0] == 1:
            weight = weight[:, :, 0]
        elif not stacked:
            weight = weight[:, :, -1]
        else:
            weight = weight.transpose(1, 2).flatten(1, 2)
        return F.conv2d(x, weight, conv.bias, padding=conv.kernel_size[-1] // 2)

    def _conv(self, conv: WanCausalConv3d, x: torch.Tensor, frames: int) -> torch.Tensor:
        stacked = conv.kernel_size[0] == 3 and frames > 1
        return self._kernel(conv, _stack_past(x, frames) if stacked else x, stacked)

    def _normed_conv(self, gamma: torch.Tensor, conv: WanCausalConv3d, x: torch.Tensor, frames: int) -> torch.Tensor:
        gamma = gamma.flatten()
        if frames > 1:
            return self._kernel(conv, self._norm_stack(x, gamma, frames), True)
        return self._kernel(conv, self._norm(x, gamma), False)

    def _resnet(self, block: WanResidualBlock, x: torch.Tensor, frames: int) -> torch.Tensor:
        shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else self._conv(block.conv_shortcut, x, frames)
        x = self._normed_conv(block.norm1.gamma, block.conv1, x, frames)
        return self._normed_conv(block.norm2.gamma, block.conv2, x, frames) + shortcut

    def _attention(self, block: WanAttentionBlock, x: torch.Tensor) -> torch.Tensor:
        return block(x.unsqueeze(2)).squeeze(2)

    def _middle(self, block: WanMidBlock, x: torch.Tensor, frames: int) -> torch.Tensor:
        x = self._resnet(block.resnets[0], x, frames)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._resnet(resnet, self._attention(attention, x), frames)
        return x

    def _down(self, block: WanResample, x: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
        x = block.resample(x)
        if block.mode != "downsample3d" or frames == 1:
            return x, frames
        clip = x.unflatten(0, (-1, frames))
        # The first frame is kept as it is; afterwards every second frame sees itself and the two before it.
        triples = torch.cat([clip[:, :-2:2], clip[:, 1:-1:2], clip[:, 2::2]], dim=2)
        weight = block.time_conv.weight.transpose(1, 2).flatten(1, 2)
        later = F.conv2d(triples.flatten(0, 1), weight, block.time_conv.bias)
        frames = (frames + 1) // 2
        joined = torch.cat([clip[:, :1], later.unflatten(0, (-1, frames - 1))], dim=1)
        return joined.flatten(0, 1).contiguous(memory_format=torch.channels_last), frames

    def _up(self, block: WanResample, x: torch.Tensor, frames: int) -> tuple[torch.Tensor, int]:
        if block.mode == "upsample3d" and frames > 1:
            clip = x.unflatten(0, (-1, frames))
            # The first frame stays single and is no past of the others.
            later = _stack_past(clip[:, 1:].flatten(0, 1), frames - 1) if frames > 2 else None
            weight = block.time_conv.weight
            if later is None:
                doubled = F.conv2d(clip[:, 1], weight[:, :, -1], block.time_conv.bias)
            else:
                doubled = F.conv2d(later, weight.transpose(1, 2).flatten(1, 2), block.time_conv.bias)
            doubled = doubled.unflatten(1, (2, -1)).unflatten(0, (-1, frames - 1)).flatten(1, 2)
            frames = 2 * frames - 1
            x = torch.cat([clip[:, :1], doubled], dim=1).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        return block.resample[1](F.interpolate(x, scale_factor=2.0, mode="nearest")), frames


@torch.no_grad()
def start_temporal_layers_as_copies(vae: AutoencoderKLWan) -> None:
    """Make the temporal layers pass frames through, so that a network trained on single frames starts clips well.

    Kernels look at the current frame alone, time is halved by keeping every second frame, and doubled by repeating.
    """
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d) and module.kernel_size == (3, 3, 3):
            module.weight[:, :, :2] = 0
        if isinstance(module, WanResample) and hasattr(module, "time_conv"):
            weight = module.time_conv.weight
            identity = torch.eye(module.dim, device=weight.device)
            weight.zero_()
            for part in range(weight.shape[0] // module.dim):
                weight[part * module.dim : (part + 1) * module.dim, :, -1, 0, 0] = identity
            module.time_conv.bias.zero_()


@torch.no_grad()
def check(vae: AutoencoderKLWan, frames: int = 9, size: int = 32) -> float:
    """Largest relative difference between the whole-clip passes and diffusers' chunked ones."""
    fast = FastAutoencoder(vae)
    video = torch.randn(2, 3, frames, size, size, device=vae.device, dtype=vae.dtype).clamp(-1, 1)
    ours, _ = fast.encode(video)
    theirs = vae.encode(video).latent_dist.mean
    encode_error = (ours - theirs).norm() / theirs.norm()
    latents = torch.randn_like(theirs)
    picture = vae.decode(latents).sample
    decode_error = (fast.decode(latents).clamp(-1, 1) - picture).norm() / picture.norm()
    return float(torch.maximum(encode_error, decode_error))
