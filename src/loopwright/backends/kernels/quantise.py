"""Rows to 8 bits with a scale each, in one pass, GELU included if asked: twins of `plain.quantise_rows` and `_gelu`."""

import torch
import triton
import triton.language as tl

from .launch import block_of, device_of, forward_only, warps_of
from .plain import LARGEST, SMALLEST


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x, out, scales, LIMIT: tl.constexpr, LEAST: tl.constexpr, GELU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + place * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh form, written with the logistic function; rounded as an activation of its own would be
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = (value * tl.sigmoid(inner)).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), LEAST) / LIMIT
    scaled = tl.minimum(tl.maximum(value / scale, -LIMIT), LIMIT)
    tl.store(out + place * WIDTH + at, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + place, scale)


def quantise_rows(x: torch.Tensor, *, gelu: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> float8_e4m3fn of that shape and a float32 scale per row [M, 1]; of GELU(x) if asked."""
    forward_only("fp8_linear", x)
    x = x.contiguous()
    count, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    with device_of(x):
        _quantise[(count,)](
            x, out, scales, LIMIT=LARGEST, LEAST=SMALLEST, GELU=gelu, WIDTH=width, BLOCK=block_of(width),
            num_warps=warps_of(width),
        )  # fmt: skip
    return out, scales
