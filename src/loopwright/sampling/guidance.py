"""Classifier-free guidance around any conditional forward, in the convention uncond + s (cond - uncond).

    velocity = guided("serial", forward, x, cond, uncond, scale)

Four ways, one meaning: "none" (one forward), "serial" (a forward a branch: bit-identical to pipelines that loop over
the branches), "batched" (branches are rows of one forward), "embedded" (the scale is an input of a distilled network).
"""

from collections.abc import Callable
from typing import Literal

import torch

Guidance = Literal["none", "serial", "batched", "embedded"]
Forward = Callable[..., torch.Tensor]


def guided(
    kind: Guidance,
    forward: Forward,
    cond: torch.Tensor,
    uncond: torch.Tensor | None,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Velocity float32 [B, ...]. `forward(text, copies, scale)` runs the network on that many copies of the rows.

    `cond`, `uncond` [B, L, D]; `scale` float32 [B]. The scale reaches the network for "embedded" alone (else None).
    """
    if kind == "none":
        return forward(cond, 1, None).float()
    if kind == "embedded":
        return forward(cond, 1, scale).float()
    if uncond is None:
        raise ValueError(f"{kind} guidance needs the unconditional branch")
    if kind == "serial":
        return combine(forward(cond, 1, None).float(), forward(uncond, 1, None).float(), scale)
    if kind != "batched":
        raise ValueError(f"unknown guidance {kind!r}; choices: none, serial, batched, embedded")
    with_text, without = forward(torch.cat([cond, uncond]), 2, None).float().chunk(2)
    return combine(with_text, without, scale)


def combine(cond: torch.Tensor, uncond: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uncond + s (cond - uncond), float32, a scale per row [B]."""
    return uncond + scale.view(-1, *[1] * (cond.ndim - 1)) * (cond - uncond)
