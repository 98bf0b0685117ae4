"""Training and serving take turns on one device: what only one of them needs is away while the other works.

    turns = Turns("both")
    turns.serves(live.leave)                    # called when serving ends: takes what it needs off the device
    turns.trains(trainer.idle())                # tensors that no sample needs
    with turns.serving(): ...                   # a rollout, previews, a judgement

What serving needs comes back when a step uses it, and not before: text encoders whose embeddings are known stay away.
Captured graphs are captured again. The optimiser's state lies in the host's memory, pinned for CUDA, while samples are
made. Nothing of this changes a bit. Deliberately absent: the networks themselves, which both use, and scorers in
processes of their own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ..backends.usage import settle
from ..distributed.shard import local

SLEEP = ("nobody", "serving", "both")


class Turns:
    """`sleep` is one of SLEEP: who leaves the device while the other works."""

    def __init__(self, sleep: str) -> None:
        assert sleep in SLEEP, "a plan resolves it"
        self._sleep = sleep
        self._leaving: list[Callable[[], object]] = []
        self._idle = Offloaded(())

    def serves(self, leave: Callable[[], object]) -> None:
        """Have this called whenever serving ends."""
        self._leaving.append(leave)

    def trains(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nobody but the trainer needs these."""
        self._idle = Offloaded(tensors)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Samples are made, for a `with` block."""
        if self._sleep == "both":
            self._idle.send()
        try:
            yield
        finally:
            if self._sleep != "nobody":
                for leave in self._leaving:
                    leave()
            self._idle.bring()


class Offloaded:
    """Tensors that can be away: they stay the same objects, without memory on their device meanwhile."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [local(tensor) for tensor in tensors]
        self._away: list[torch.Tensor] = []

    @torch.no_grad()
    def send(self) -> int:
        """Copy them to the host and give their memory back; the bytes of that."""
        if self._away:
            return 0
        self._away = [_copied(tensor) for tensor in self._tensors]
        for device in {str(tensor.device) for tensor in self._tensors}:
            settle(device)
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        return sum(copy.nbytes for copy in self._away)

    @torch.no_grad()
    def bring(self) -> None:
        """Have them as they were; nothing if they are here."""
        for tensor, copy in zip(self._tensors, self._away, strict=False):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy)
        self._away = []


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host. The tensor has its storage to itself: a part of one could not leave alone."""
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
