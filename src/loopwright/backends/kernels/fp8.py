"""Products of 8-bit floats (e4m3): weights with a scale per output, activations with a scale per token, found anew.

    ffn = FeedForward(up, down)          # from two bfloat16 layers; their weights are quantised here, once
    y = ffn(x)                           # [B, L, D] -> the same

Quantising is one pass over the activations, GELU included, else it would cost what the faster product saves. On CUDA
from sm_89. The twin is `plain.fp8_linear` on what `plain.quantise_rows` gives. No backward pass.
"""

import torch

from ...errors import BackendError
from . import plain

_STEP = 16  # sizes of 8-bit products are multiples of this


def linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] and weight [N, K] in 8 bits, scales [M, 1] and [1, N], bias bfloat16 [N] -> bfloat16 [M, N]."""
    out: torch.Tensor = torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out


class Linear(torch.nn.Module):
    """The weights of a layer in 8 bits. Raises BackendError for sizes that 8-bit products do not have."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        if layer.in_features % _STEP or layer.out_features % _STEP:
            raise BackendError(
                f"float8 layers have sizes in multiples of {_STEP}",
                value=f"{layer.in_features} to {layer.out_features}",
                remedy="use bfloat16 for this model",
            )
        weight, scale = plain.quantise_rows(layer.weight.detach())
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias: torch.nn.Parameter | None = layer.bias

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        """x float8 [M, K], x_scale [M, 1] -> bfloat16 [M, N]."""
        return linear(x, x_scale, self.weight, self.get_buffer("scale"), self.bias)


class FeedForward(torch.nn.Module):
    """Up, GELU (tanh form), down, with 8-bit products. Takes the layers of a bfloat16 feed-forward network."""

    def __init__(self, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        super().__init__()
        self.up, self.down = Linear(up), Linear(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, D] -> bfloat16 [B, L, D]."""
        from .quantise import quantise_rows

        hidden: torch.Tensor = self.up(*quantise_rows(x.flatten(0, -2)))
        out: torch.Tensor = self.down(*quantise_rows(hidden, gelu=True))
        return out.reshape(x.shape)
