"""Attention by name: full attention without a mask, as diffusion transformers use it.

    out = flash(q, k, v)          # [B, L, H, D] each, k and v of another length L if need be -> [B, L, H, D]

Torch can be told which of its implementations to use by flags of the whole process only, which would reach other
models and threads. Here each implementation is called by its own operator instead. `sdpa` is torch's own pick.
Gradients flow through all but `fa3`.

Deliberately absent: masks, causality, dropout, and falling back: what an operator cannot do raises BackendError.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from ..errors import BackendError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_WIDEST = 256  # values a head, of every fused implementation


def sdpa(q_BLHD: torch.Tensor, k_BLHD: torch.Tensor, v_BLHD: torch.Tensor) -> torch.Tensor:
    """Whichever implementation torch picks for these tensors on this device."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q_BLHD, k_BLHD, v_BLHD))
    return functional.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3)


def plain(q_BLHD: torch.Tensor, k_BLHD: torch.Tensor, v_BLHD: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v with all scores in memory."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q_BLHD, k_BLHD, v_BLHD))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]
    return out.permute(0, 2, 1, 3)


def flash(q_BLHD: torch.Tensor, k_BLHD: torch.Tensor, v_BLHD: torch.Tensor) -> torch.Tensor:
    """FlashAttention 2 on CUDA, torch's tiled kernel on the CPU."""
    if q_BLHD.device.type == "cpu":
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q_BLHD, k_BLHD, v_BLHD))
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
        return out.permute(0, 2, 1, 3)
    return _in_eights("flash", _flash_cuda, q_BLHD, k_BLHD, v_BLHD)


def _flash_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    return out.permute(0, 2, 1, 3)


def cudnn(q_BLHD: torch.Tensor, k_BLHD: torch.Tensor, v_BLHD: torch.Tensor) -> torch.Tensor:
    """cuDNN's attention."""
    return _in_eights("cudnn", _cudnn, q_BLHD, k_BLHD, v_BLHD)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    # what the backward pass needs is computed only where there will be one
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, kept, scale=scale)[0]
    return out.permute(0, 2, 1, 3)


def fa3(q_BLHD: torch.Tensor, k_BLHD: torch.Tensor, v_BLHD: torch.Tensor) -> torch.Tensor:
    """FlashAttention 3, from the package `fa3-fwd`. Raises BackendError where gradients are wanted."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BLHD, k_BLHD, v_BLHD)):
        raise BackendError("attention has no backward pass", value="fa3", choices=("cudnn", "flash", "sdpa", "math"))
    return _in_eights("fa3", _fa3, q_BLHD, k_BLHD, v_BLHD)


def _fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    from fa3_fwd_interface import flash_attn_func

    out: torch.Tensor | tuple[torch.Tensor, ...] = flash_attn_func(q, k, v, softmax_scale=scale)
    return out[0] if isinstance(out, tuple) else out


def _in_eights(
    name: str,
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Fused implementations take heads in multiples of 8: zeros up to there change no score and no sum."""
    width = q.shape[-1]
    if width > _WIDEST:
        raise BackendError(
            f"{name} attention takes heads of at most {_WIDEST} values", value=width, choices=("sdpa", "math")
        )
    scale, missing = 1 / math.sqrt(width), -width % 8
    if not missing:
        return run(q, k, v, scale)
    q, k, v = (functional.pad(x, (0, missing)) for x in (q, k, v))
    return run(q, k, v, scale)[..., :width]
