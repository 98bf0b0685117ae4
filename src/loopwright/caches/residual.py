"""Tensors a request remembers from one step to the next, for caches that skip work: one lease a guidance branch.

    page = residual_page({"block": (tokens, channels)}, dtype="bfloat16")
    PoolRef("residual.cond", page, LATEST, committed=times_remembered)

    def op(parts, *, x, cond, cond_pages, cond_length, ...):
        memory = Residual(cond, cond_pages, cond_length)
        known, last = memory.known, memory.recall("block")
        memory.remember("block", new)

What is remembered goes to another page than what is recalled, and takes its place when the loop commits it: `committed`
counts how often that was. A step that skipped the work commits nothing.
"""

from collections.abc import Mapping

import torch

from ..loop import Page, Window
from .pool import Storage

LATEST = Window(last=1)


def residual_page(shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "float32") -> Page:
    """A page of one tensor of each name; shapes without the row dimension."""
    return Page(tuple((name, tuple(shape), dtype) for name, shape in shapes.items()))


class Residual:
    """The memory of a call: storage [P, ...], a row's pages int32 [R, 2], whether there is one to read int32 [R]."""

    def __init__(self, storage: Storage, pages: torch.Tensor, length: torch.Tensor) -> None:
        self._storage, self._pages, self._length = storage, pages.long(), length.long()

    @property
    def known(self) -> torch.Tensor:
        """bool [R]: whether the row has anything to recall."""
        return self._length > 0

    def recall(self, name: str) -> torch.Tensor:
        """[R, ...]: what was committed last; zeros where that is nothing."""
        stored = self._storage[name][self._pages[:, 0]]
        return torch.where(self.known.view(-1, *[1] * (stored.ndim - 1)), stored, 0)

    def remember(self, name: str, value: torch.Tensor) -> None:
        """[R, ...]: what will be recalled once it is committed."""
        stored = self._storage[name]
        stored[self._pages.gather(1, self._length[:, None])[:, 0]] = value.to(stored.dtype)
