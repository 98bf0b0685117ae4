"""The ops of scorers. Shapes: B rows, F frames, L tokens, D the width of the space that text and pictures share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...loops.common import finite

if TYPE_CHECKING:
    from transformers import CLIPModel

Parts = Mapping[str, nn.Module]
Out = dict[str, torch.Tensor]


def embed_text(parts: Parts, *, ids: torch.Tensor, mask: torch.Tensor) -> Out:
    """Tokens [B, L] and which of them count -> unit vectors float32 [B, D]."""
    model: CLIPModel = parts["model"]
    out = _unit(model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output)
    return {"out": out, "finite": finite(out)}


def score(parts: Parts, *, pixels: torch.Tensor, text: torch.Tensor) -> Out:
    """Frames as the model wants them [B, F, 3, H, W] and the prompt's vector [B, D] -> float32 [B, 1].

    The cosine of text and picture, the mean over frames: CLIPScore without its factor and floor (Hessel et al., 2021).
    """
    model: CLIPModel = parts["model"]
    seen = model.get_image_features(pixel_values=pixels.flatten(0, 1).to(model.dtype)).pooler_output
    cosines = (_unit(seen).unflatten(0, pixels.shape[:2]) * text[:, None]).sum(dim=-1)
    out = cosines.mean(dim=1, keepdim=True)
    return {"out": out, "finite": finite(out)}


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    vectors = vectors.float()
    return vectors / vectors.square().sum(dim=-1, keepdim=True).sqrt()
