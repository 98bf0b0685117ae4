"""Whole clips through the autoencoder: the same function as diffusers' chunks, values and gradients."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from loopwright.models.wan.whole_clip import WholeClip


def autoencoder(*, patch: int | None, temporal: list[bool], residual: bool = True) -> AutoencoderKLWan:
    torch.manual_seed(0)
    channels = 3 * (patch or 1) ** 2
    vae = AutoencoderKLWan(
        base_dim=4, decoder_base_dim=8, z_dim=5, dim_mult=[1, 2, 2][: len(temporal) + 1], num_res_blocks=1,
        attn_scales=[], temperal_downsample=temporal, is_residual=residual, in_channels=channels, out_channels=channels,
        patch_size=patch, latents_mean=[0.0] * 5, latents_std=[1.0] * 5,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.mul_(2.0)
    return vae


@pytest.mark.parametrize("frames", [1, 5, 9])
@pytest.mark.parametrize(
    ("patch", "temporal", "residual"),
    [(2, [True, True], True), (None, [True, True], True), (2, [False, True], True), (None, [False, True], False)],
)
def test_a_whole_clip_passes_as_its_chunks_do(patch, temporal, residual, frames):
    vae = autoencoder(patch=patch, temporal=temporal, residual=residual)
    clip, video = WholeClip(vae), torch.rand(2, 3, frames, 32, 32) * 2 - 1
    theirs = vae.encode(video).latent_dist
    mean, log_variance = clip.encode(video)
    torch.testing.assert_close(mean, theirs.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_variance, theirs.logvar, rtol=1e-4, atol=1e-4)
    latents = torch.randn_like(mean)
    torch.testing.assert_close(clip.decode(latents).clamp(-1, 1), vae.decode(latents).sample, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_chunks():
    vae = autoencoder(patch=None, temporal=[True, True])
    clip, video = WholeClip(vae), torch.rand(1, 3, 5, 16, 16) * 2 - 1
    grads = []
    for latents in (lambda: clip.encode(video)[0], lambda: vae.encode(video).latent_dist.mean):
        vae.zero_grad()
        latents().square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in vae.named_parameters() if p.grad is not None})
    ours, theirs = grads
    assert ours.keys() == theirs.keys() and any(grad.abs().max() > 0.1 for grad in theirs.values())
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()) + 1e-6)
