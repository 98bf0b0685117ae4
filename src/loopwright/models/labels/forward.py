"""The ops of label-conditional models. Shapes: B rows, C channels, S height and width, L labels."""

from collections.abc import Mapping

import torch
from torch import nn

from ...errors import BackendError
from ...loops.common import finite
from ...request import ATTENTION, KERNELS

Out = dict[str, torch.Tensor]


def encode_label(parts: Mapping[str, nn.Module], *, number: torch.Tensor, count: int) -> Out:
    """Numbers of labels [B], -1 for none -> one-hot float32 [B, 1, L]."""
    out = (number[:, None] == torch.arange(count, device=number.device)).float()
    return {"out": out[:, None], "finite": finite(out)}


def velocity(
    network: nn.Module,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    attention: str = ATTENTION,
    kernels: str = KERNELS,
) -> torch.Tensor:
    """latents float32 [B, C, 1, S, S], timestep [B] in 0..1000, text [B, 1, L] -> velocity like the latents."""
    if (attention, kernels) != (ATTENTION, KERNELS):
        raise BackendError("a perceptron has no choice of kernels", value=f"{attention}, {kernels}",
                           choices=(f"{ATTENTION}, {KERNELS}",))  # fmt: skip
    out: torch.Tensor = network(latents.flatten(1), timestep, text[:, 0])
    return out.view_as(latents)


def show(parts: Mapping[str, nn.Module], *, latents: torch.Tensor) -> Out:
    """[B, C, T, S, S] in -1..1 -> pixels uint8 [B, T, S, S, 3]."""
    pixels = (latents.clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    return {"out": pixels.expand(*pixels.shape[:4], 3).contiguous(), "finite": finite(latents)}
