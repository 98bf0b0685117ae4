"""A stand-in for CUDA graphs on the CPU: a recording runs its work again on the same tensors, into the same outputs.

While it records, looking at a value on the host is refused, as a device refuses it.
"""

from collections.abc import Callable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = Mapping[str, torch.Tensor]


class Recorded:
    """Its outputs stay where they are."""

    def __init__(self, run: Callable[[], Tensors]) -> None:
        self._run = run
        self.outputs = {name: tensor.clone() for name, tensor in run().items()}

    def replay(self) -> None:
        for name, tensor in self._run().items():
            self.outputs[name].copy_(tensor)


class StandIn:
    """`bytes`: `each` a recording, until it is released."""

    def __init__(self, each: int = 1000) -> None:
        self.each, self.bytes, self.followed, self.released = each, 0, 0, False

    def record(self, run: Callable[[], Tensors]) -> Recorded:
        with NoLooking():
            run()
        self.bytes += self.each
        return Recorded(run)

    def follow(self) -> None:
        self.followed += 1

    def release(self) -> None:
        self.bytes, self.released = 0, True


class StandIns:
    """Makes captures, and remembers them."""

    def __init__(self, each: int = 1000) -> None:
        self.each, self.made = each, []

    def __call__(self, device: str) -> StandIn:
        self.made.append(StandIn(self.each))
        return self.made[-1]


class NoLooking(TorchDispatchMode):
    """Refuses what waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))
