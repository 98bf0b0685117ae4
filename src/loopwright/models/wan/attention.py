"""The attention processor of Wan transformers: diffusers' arithmetic, with attention and kernels chosen by the call.

Bit-identical to diffusers' own processor under "sdpa" and "plain". Shapes: B rows, L tokens, H heads, D values a head.
"""

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, _get_added_kv_projections, _get_qkv_projections

from ...backends.kernels.plain import Rotary
from .choice import Holder

_TEXT_TOKENS = 512  # diffusers takes whatever comes before the last 512 tokens for the image's


class Processor:
    """One serves every attention of a module."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """[B, L, H*D] -> the same; keys and values come from `encoder_hidden_states` if given, the image's first."""
        assert attention_mask is None, "Wan attends to everything"
        image = None
        if attn.add_k_proj is not None:
            assert encoder_hidden_states is not None
            count = encoder_hidden_states.shape[1] - _TEXT_TOKENS
            image, encoder_hidden_states = encoder_hidden_states[:, :count], encoder_hidden_states[:, count:]
        q, k, v = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        q_BLHD, k_BLHD = self._normalised(attn, q, k, rotary_emb)
        out = self._attend(attn, q_BLHD, k_BLHD, v)
        if image is not None:
            k, v = _get_added_kv_projections(attn, image)
            out = out + self._attend(attn, q_BLHD, _heads(attn, attn.norm_added_k(k)), v)
        out = attn.to_out[0](out)
        result: torch.Tensor = attn.to_out[1](out)
        return result

    def _normalised(
        self, attn: WanAttention, q: torch.Tensor, k: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rotary is None:
            return _heads(attn, attn.norm_q(q)), _heads(attn, attn.norm_k(k))
        turn = self.holder.choice.norm_rotary
        return (
            turn(q, attn.norm_q.weight, attn.norm_q.eps, rotary, attn.heads),
            turn(k, attn.norm_k.weight, attn.norm_k.eps, rotary, attn.heads),
        )

    def _attend(self, attn: WanAttention, q_BLHD: torch.Tensor, k_BLHD: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.holder.choice.attend(q_BLHD, k_BLHD, _heads(attn, v)).flatten(2, 3).type_as(q_BLHD)


def _heads(attn: WanAttention, x: torch.Tensor) -> torch.Tensor:
    """[B, L, H*D] -> [B, L, H, D]."""
    split: torch.Tensor = x.unflatten(2, (attn.heads, -1))
    return split
