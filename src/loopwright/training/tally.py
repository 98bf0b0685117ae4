"""Sums over the rows of a step: of this process, then of all.

tally = Tally()
tally.add(losses, real=3)
tally.means(group)              # {"loss": ..., "loss/sigma_0.3": ...}, NaN values and filler rows left out
"""

import torch

from ..distributed.group import Group
from .methods import Losses


class Tally:
    """Per name, the sum over the rows that count and say something, and how many they are; and the tokens read."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def add(self, losses: Losses, real: int) -> None:
        """Rows from `real` on are fillers."""
        for name, values in {"loss": losses.rows, **losses.logs}.items():
            counted = values.detach()[:real].double()
            given = counted if name == "loss" else counted[~counted.isnan()]  # a loss that is NaN shall be seen
            pair = torch.stack([given.sum(), torch.tensor(len(given), dtype=torch.float64, device=given.device)])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair
        self._tokens += losses.tokens * real // len(losses.rows)

    def reduced(self, group: Group) -> tuple[dict[str, float], int]:
        """The mean under each name over all processes, without those of no row; and the tokens. A collective."""
        pairs = torch.stack(list(self._sums.values())).cpu()
        table = group.total(torch.cat([pairs, torch.tensor([[float(self._tokens), 0]], dtype=torch.float64)]))
        means = {name: float(total / count) for name, (total, count) in zip(self._sums, table, strict=False) if count}
        return means, int(table[-1, 0])
