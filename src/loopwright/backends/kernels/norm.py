"""LayerNorm, scale and shift in one pass over the tokens: the twin of `plain.adaptive_norm`."""

import torch
import triton
import triton.language as tl

from .launch import block_of, device_of, forward_only, warps_of


@triton.jit
def _adaptive_norm(  # type: ignore[no-untyped-def]
    x, scale, shift, out, tokens, eps, scale_row, scale_token, shift_row, shift_token,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + place * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    normal = centred / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    factor = tl.load(scale + row * scale_row + token * scale_token + at, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + row * shift_row + token * shift_token + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place * WIDTH + at, (normal * (1 + factor) + offset).to(out.dtype.element_ty), mask=inside)


def adaptive_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm without weights, times 1 + scale, plus shift. x [B, L, D]; scale, shift float32 [B, 1 or L, D]."""
    forward_only("adaptive_norm", x, scale, shift)
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, tokens, width = x.shape
    with device_of(x):
        _adaptive_norm[(rows * tokens,)](
            x, scale, shift, out, tokens, eps, *_strides(scale), *_strides(shift),
            WIDTH=width, BLOCK=block_of(width), num_warps=warps_of(width),
        )  # fmt: skip
    return out


def _strides(modulation: torch.Tensor) -> tuple[int, int]:
    """From row to row and from token to token; one for all does not move."""
    assert modulation.stride(2) == 1
    return tuple(modulation.stride(i) if modulation.shape[i] > 1 else 0 for i in (0, 1))  # type: ignore[return-value]
