"""The forward of a Wan block: diffusers' arithmetic, with the norms of the call's choice.

Bit-identical to diffusers' own forward under "plain". Takes the place of `block.forward`, so that the block stays the
module it was, with its weights, its class and its hooks.
"""

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from ...backends.kernels.plain import Rotary
from .choice import Holder


def forward(
    block: WanTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: Rotary,
    *,
    holder: Holder,
) -> torch.Tensor:
    """[B, L, D] -> the same. `temb` is [B, 6, D], or [B, L, 6, D] where each token has a timestep of its own."""
    norm, x = holder.choice.adaptive_norm, hidden_states
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = _modulation(block, temb)
    out = block.attn1(norm(x, scale, shift, block.norm1.eps), None, None, rotary_emb)
    x = (x.float() + out * gate).type_as(x)
    out = block.attn2(block.norm2(x.float()).type_as(x), encoder_hidden_states, None, None)
    x = x + out
    out = block.ffn(norm(x, ffn_scale, ffn_shift, block.norm3.eps))
    result: torch.Tensor = (x.float() + out.float() * ffn_gate).type_as(x)
    return result


def _modulation(block: WanTransformerBlock, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Six views, float32 [B, 1 or L, D]."""
    table: torch.Tensor = block.scale_shift_table
    if temb.ndim == 4:
        return tuple(part.squeeze(2) for part in (table.unsqueeze(0) + temb.float()).chunk(6, dim=2))
    return (table + temb.float()).chunk(6, dim=1)
