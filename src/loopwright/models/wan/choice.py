"""Which functions compute a call of a Wan transformer, and the holder through which its parts learn of it.

    holder = Holder()                                # one a module
    with holder.bound(choice_of("flash", "fused")):
        module(hidden_states=...)

diffusers keeps such choices on each processor or for the whole process. Here the processors and blocks of a module look
at one small holder that belongs to this module. Calls with the same choice run side by side; one with another choice
waits until the module is free, so that threads cannot disturb each other, nor other modules of the process.

Where gradients are computed with recomputation (gradient checkpointing), hold the choice over the backward pass too.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from ...backends import registry
from ...backends.attention import Attend
from ...backends.kernels import plain
from ...request import ATTENTION, KERNELS


@dataclass(frozen=True, slots=True)
class Choice:
    """The functions of one call: the norms are kernels of their own, or their plain twins."""

    attend: Attend
    adaptive_norm: plain.AdaptiveNorm
    norm_rotary: plain.NormRotary


@functools.cache
def choice_of(attention: str, kernels: str) -> Choice:
    """The functions of those names, which must be available here: whoever admits a request looks."""
    attend = cast(Attend, registry.load(attention))
    if kernels == KERNELS:
        return Choice(attend, plain.adaptive_norm, plain.norm_rotary)
    norm, rotary = registry.load("adaptive_norm"), registry.load("norm_rotary")
    return Choice(attend, cast(plain.AdaptiveNorm, norm), cast(plain.NormRotary, rotary))


class Holder:
    """The choice of the calls now running in one module: processors and blocks read `choice`."""

    def __init__(self) -> None:
        self.choice = choice_of(ATTENTION, KERNELS)
        self._free = threading.Condition()
        self._running = self._waiting = 0

    @contextmanager
    def bound(self, choice: Choice) -> Iterator[None]:
        """Hold the choice for a call. Waits while the module runs under another, or somebody waits for another."""
        with self._free:
            self._waiting += 1
            self._free.wait_for(lambda: not self._running or (choice is self.choice and self._waiting == 1))
            self._waiting -= 1
            self._running += 1
            self.choice = choice
        try:
            yield
        finally:
            with self._free:
                self._running -= 1
                if not self._running:
                    self.choice = choice_of(ATTENTION, KERNELS)
                    self._free.notify_all()

    def __deepcopy__(self, memo: dict[int, object]) -> "Holder":
        """A copy of the module is another module: its parts share a holder of their own."""
        copied = memo[id(self)] = Holder()
        return copied
