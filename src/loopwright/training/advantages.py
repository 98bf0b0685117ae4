"""How much better a sample is than others of its prompt, in their standard deviations.

    found = grouped(torch.tensor([[0.1, 0.5, nan], [1.0, 1.0, 1.0]]))       # a group a row, NaN: not scored
    found.values            # [[-1, 1, nan], [0, 0, 0]]
    found.flat              # [False, True]: nothing can be learnt from a group that is all the same
    found.lost              # [False, False]: of no group too little was scored to compare anything

Deviations are of the group alone, in float64. Source: GRPO, Shao et al. 2024 (arXiv 2402.03300).
"""

from dataclasses import dataclass

import torch

_LITTLE = 1e-4  # beside a deviation, so that nearly equal scores do not become large advantages
_FLAT = 1e-8


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` float64 [G, N], NaN where there is no score; bool [G] `flat`, groups without any spread, and `lost`,
    those of them of which one sample or none was scored."""

    values: torch.Tensor
    flat: torch.Tensor
    lost: torch.Tensor


def grouped(scores: torch.Tensor) -> Advantages:
    """The advantages of scores [G, N]. A group of which one sample or none was scored is flat."""
    scores = scores.double()
    there = ~scores.isnan()
    count = there.sum(1, keepdim=True).clamp(min=1)
    mean = scores.nansum(1, keepdim=True) / count
    apart = torch.where(there, scores - mean, 0.0)
    std = (apart.square().sum(1, keepdim=True) / count).sqrt()
    values = torch.where(there, apart / (std + _LITTLE), torch.nan)
    return Advantages(values, std[:, 0] <= _FLAT, there.sum(1) < 2)
