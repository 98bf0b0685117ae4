"""Sums over the rows of steps: of this process, then of all.

tally = Tally()
tally.add(losses, real=3)
tally.reduced(group)            # {"loss": ..., "loss/sigma_0.3": ...}, NaN values and filler rows left out

Nothing waits for the device before `reduced`.
"""

import torch

from ..distributed.group import Group
from .methods import Losses


class Tally:
    """Per name, the sum over the rows that count and say something, and how many they are; and the tokens read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._tokens = 0

    def add(self, losses: Losses, real: int) -> None:
        """Rows from `real` on are fillers."""
        names = ("loss", *losses.logs)
        rows = torch.stack([losses.rows.detach(), *losses.logs.values()])[:, :real].double()
        says = ~rows.isnan()
        says[0] = True  # a loss that is NaN shall be seen
        pairs = torch.stack([torch.where(says, rows, 0).sum(1), says.sum(1)], dim=1)
        self._sums[names] = self._sums[names] + pairs if names in self._sums else pairs
        self._tokens += losses.tokens * real // len(losses.rows)

    def reduced(self, group: Group) -> tuple[dict[str, float], int]:
        """The mean under each name over all processes, without those of no row; and the tokens. A collective where
        anything was added, as it must be in all or none."""
        if not self._sums:
            return {}, 0
        names = [name for group_of in self._sums for name in group_of]
        pairs = torch.cat([pairs.cpu() for pairs in self._sums.values()])
        table = group.total(torch.cat([pairs, torch.tensor([[float(self._tokens), 0]], dtype=torch.float64)]))
        sums: dict[str, torch.Tensor] = {}
        for name, pair in zip(names, table, strict=False):
            sums[name] = sums[name] + pair if name in sums else pair
        return {name: float(total / count) for name, (total, count) in sums.items() if count}, int(table[-1, 0])
