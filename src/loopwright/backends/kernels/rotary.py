"""RMSNorm over all heads and rotary embedding in one pass: the twin of `plain.norm_rotary`."""

import torch
import triton
import triton.language as tl

from .launch import block_of, device_of, forward_only, warps_of
from .plain import Rotary


@triton.jit
def _norm_rotary(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, out, tokens, eps,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    token = place % tokens
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + place * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normal = value / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps) * gain
    # the twin's norm ends in the precision of x
    first, second = tl.split(tl.reshape(normal.to(x.dtype.element_ty).to(tl.float32), (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    angle = token * HEAD + (2 * pair) % HEAD
    c = tl.load(cos + angle, mask=pair < WIDTH // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + 1, mask=pair < WIDTH // 2, other=0.0).to(tl.float32)
    turned = tl.reshape(tl.join(first * c - second * s, first * s + second * c), (BLOCK,))
    tl.store(out + place * WIDTH + at, turned.to(out.dtype.element_ty), mask=inside)


def norm_rotary(x: torch.Tensor, weight: torch.Tensor, eps: float, rotary: Rotary, heads: int) -> torch.Tensor:
    """RMSNorm over all heads, then rotation of neighbouring values. x [B, L, H*D] -> [B, L, H, D].

    `rotary`: cosines and sines, float32 [1, L, 1, D], each angle twice, for the two values it turns.
    """
    forward_only("norm_rotary", x, weight)
    x, cos, sin = (tensor.contiguous() for tensor in (x, *rotary))
    rows, tokens, width = x.shape
    out = x.new_empty(rows, tokens, heads, width // heads)
    with device_of(x):
        _norm_rotary[(rows * tokens,)](
            x, weight, cos, sin, out, tokens, eps,
            WIDTH=width, HEAD=width // heads, BLOCK=block_of(width), num_warps=warps_of(width),
        )  # fmt: skip
    return out
