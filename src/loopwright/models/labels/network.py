"""A perceptron that gives the velocity of a small image under a label.

network = LabelFlow(labels=["a", "b"], size=8, channels=1, width=256, depth=2)
network(x, timestep, label)         # [B, C * size * size], [B], one-hot [B, L] -> like x
"""

import math

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

_FREQUENCIES = 32


class LabelFlow(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Residual blocks of width `width`, each told time and label once more."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, labels: list[str], size: int, channels: int, width: int, depth: int) -> None:
        super().__init__()
        values = channels * size * size
        self.take = nn.Linear(values, width)
        self.tell = nn.Linear(2 * _FREQUENCIES + len(labels), width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.give = nn.Linear(width, values)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """x float32 [B, N], timestep [B] in 0..1000, label [B, L], all zero for none -> [B, N]."""
        told = F.silu(self.tell(torch.cat([waves(timestep / 1000), label.to(x.dtype)], dim=1)))
        hidden = self.take(x)
        for block in self.blocks:
            hidden = block(hidden, told)
        out: torch.Tensor = self.give(F.silu(hidden))
        return out


class Block(nn.Module):
    """h + W2 silu(W1 (norm(h) + told))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        """[B, W] -> the same."""
        out: torch.Tensor = hidden + self.down(F.silu(self.up(self.norm(hidden) + told)))
        return out


def waves(t: torch.Tensor) -> torch.Tensor:
    """Times [B] in 0..1 as sines and cosines [B, 64]."""
    rates = torch.exp(torch.linspace(0, math.log(1000), _FREQUENCIES, device=t.device))
    turns = t.float()[:, None] * rates
    return torch.cat([turns.sin(), turns.cos()], dim=1)
