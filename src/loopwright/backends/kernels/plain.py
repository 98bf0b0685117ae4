"""What the fused kernels compute, in torch's own operations. Gradients flow through all of it.

Shapes: B rows, L tokens, D width, H heads.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

AdaptiveNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]
NormRotary = Callable[[torch.Tensor, torch.Tensor, float, Rotary, int], torch.Tensor]
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-12  # a row of zeros gets a scale all the same


def adaptive_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm without weights, times 1 + scale, plus shift. x [B, L, D]; scale, shift float32 [B, 1 or L, D]."""
    return (functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift).type_as(x)


def norm_rotary(x: torch.Tensor, weight: torch.Tensor, eps: float, rotary: Rotary, heads: int) -> torch.Tensor:
    """RMSNorm over all heads, then rotation of neighbouring values. x [B, L, H*D] -> [B, L, H, D].

    `rotary`: cosines and sines, float32 [1, L, 1, D], each angle twice, for the two values it turns.
    """
    x_BLHD = functional.rms_norm(x, x.shape[-1:], weight, eps).unflatten(2, (heads, -1))
    first, second = x_BLHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).type_as(x)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> float8_e4m3fn of that shape and a float32 scale per row [M, 1]; their product is x again, nearly."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def quantise_gelu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise_rows` of GELU (its tanh form)."""
    return quantise_rows(functional.gelu(x, approximate="tanh"))


def fp8_linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] and weight [N, K] in 8 bits, scales [M, 1] and [1, N], bias bfloat16 [N] -> bfloat16 [M, N]."""
    out = (x.float() * x_scale) @ (weight.float() * weight_scale.t()).t()
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)
